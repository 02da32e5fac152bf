"""Admission control: which requests would keep their SLO, and what is in flight."""
