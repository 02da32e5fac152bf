"""How many GPUs, and which layout, meet a latency SLO."""
