"""Training: FLOPs, memory, step time and layout of a job on the same GPUs and links."""
