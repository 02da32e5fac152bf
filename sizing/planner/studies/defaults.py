"""What the studies ask where nothing else is asked for; the help of their commands says it."""

THINK_S = 10.0
"""Seconds between an answer and the same user's next request, where the load has none."""

INTERVAL_S = 300.0
"""Seconds between two decisions, if nothing else is asked for."""

ATTAINMENT = 0.999
"""Share of a day's requests that are to find the SLO held, if nothing else is asked for."""

DECISIONS = (
    *("router", "percentile", "confidence", "pools", "class pools", "chunk size", "spares"),
    *("weights", "KV cache", "overlap", "accepted drafts", "prefix hits", "rate", "prompts"),
    *("answers", "links", "spine"),
)
"""What `decisions` changes, one at a time."""
