"""Seconds of one engine step."""
