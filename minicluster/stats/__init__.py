"""Quantiles, confidence intervals and bootstrap tests of measured latencies."""
