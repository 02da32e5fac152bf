"""Arrivals, lengths and traces: which requests come when."""
