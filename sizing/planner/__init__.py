"""From a scenario to the fewest GPUs that hold its SLO."""
