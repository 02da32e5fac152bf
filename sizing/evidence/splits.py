"""The ways to leave rows out of the intervals that are then tried on them."""

SPLITS = (
    "family", "engine", "version", "gpu", "generation", "source",
    "family+engine", "family+generation", "families",
)  # fmt: skip
"""
A split leaves out everything that has one of these names, a name at a time.

Of two, intervals are tried on what has both names and are learned from what has neither; with
`families` they are learned from one, two or three of a kind of load's beside all other kinds, and
tried on its others.
"""
