"""The run of a load test: job, schedule, stages, client health, and the folder with its files."""
