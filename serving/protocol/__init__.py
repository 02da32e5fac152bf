"""Values that cross a process boundary: endpoint configuration, refusals, phases."""
