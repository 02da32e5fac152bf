"""Load a served plan and judge the latencies achieved."""
