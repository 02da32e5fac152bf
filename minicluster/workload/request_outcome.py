"""Whether a request of a load test reached an engine, by its outcome in `samples.jsonl`."""

from __future__ import annotations

TURNED_AWAY = ("shed", "refused", "client")
"""Outcomes of requests that reached no engine; the simulation has no admission control."""


def turned_away(outcome: str, detail: str | None) -> bool:
    """
    Return whether the endpoint refused a request (4xx, 503), or never received it.

    Args:
        outcome: one of `minicluster.workload.samples.OUTCOMES`.
        detail: detail of the outcome; that of a bad status begins with the status.
    """
    client_error = outcome == "bad_status" and (detail or "").startswith("4")
    return outcome in TURNED_AWAY or client_error
