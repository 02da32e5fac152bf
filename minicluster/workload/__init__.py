"""Arrivals, lengths and traces: which requests come when."""

PROCESSES = ("poisson", "gamma", "constant")  # distributions of the gaps between arrivals
