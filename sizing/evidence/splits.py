"""The ways to leave rows out of the intervals that are then tried on them."""

SPLITS = ("family", "engine", "gpu", "source")
"""A split leaves out everything that has one of these names, a name at a time."""
