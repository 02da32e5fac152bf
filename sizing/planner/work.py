"""What a search may still simulate: a bound counted in work, so that same inputs end alike."""

from __future__ import annotations

from dataclasses import dataclass

REQUESTS = 1_500_000
"""That all runs of one search may have together: most of a minute."""

PER_REPLICA = 8
"""Requests that setting up one replica takes as long as."""


@dataclass(slots=True)
class Work:
    """Simulated requests that are left; runs take theirs off."""

    left: int = REQUESTS

    def take(self, requests: int, replicas: int) -> bool:
        """Take a run's share off; `False`, and nothing taken, where it is more than is left."""
        share = requests + PER_REPLICA * replicas
        if share > self.left:
            return False
        self.left -= share
        return True
