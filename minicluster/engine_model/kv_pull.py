"""Seconds of a pull of a KV cache from one replica to another."""

from __future__ import annotations

from typing import Protocol


class PullPath(Protocol):
    """The path of a pull."""

    @property
    def transfer_base_s(self) -> float:
        """Fixed part, which holds no NIC."""

    @property
    def transfer_per_token_s(self) -> float:
        """Part per token, which holds the NICs of both replicas."""


def pull_times(path: PullPath, num_tokens: int, start_s: float) -> tuple[float, float]:
    """
    Return when a pull that starts frees both NICs, and when its KV cache is there.

        free = start + n b,  there = free + a      (docs/model.md, eq. Q6)
    """
    free_s = start_s + num_tokens * path.transfer_per_token_s
    return free_s, free_s + path.transfer_base_s
