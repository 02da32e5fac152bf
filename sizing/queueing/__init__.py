"""Closed-form queueing: waiting times and percentiles of a prefill-decode tandem."""
