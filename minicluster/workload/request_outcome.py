"""How a request of a load test ended, as `samples.jsonl` says: whether an engine ever saw it."""

from __future__ import annotations

TURNED_AWAY = ("shed", "refused", "client")
"""Outcomes of requests that no engine has seen; the simulation has no door that could be closed."""


def turned_away(outcome: str, detail: str | None) -> bool:
    """
    Say whether a request was refused at the door (4xx, 503), or never came there.

    Args:
        outcome: one of `minicluster.workload.samples.OUTCOMES`.
        detail: what was seen; of a bad status it begins with the status.
    """
    client_error = outcome == "bad_status" and (detail or "").startswith("4")
    return outcome in TURNED_AWAY or client_error
