"""Arrivals, lengths and traces: which requests come when."""

PROCESSES = ("poisson", "gamma", "constant")
"""Distributions of the gaps between arrivals."""
