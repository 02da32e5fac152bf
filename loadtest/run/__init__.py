"""What a load test sends: job, schedule, stages, and the folder that keeps the run."""
