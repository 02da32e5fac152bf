"""Queues of KV-cache pulls at the NICs of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.kv_pull import pull_times

if TYPE_CHECKING:
    from sizing.simulation.system import Path


class NicQueues:
    """
    The NICs of all replicas (docs/model.md, eq. Q6).

    A pull holds the NICs of both replicas for its bytes. Its fixed part, and the handshake of two
    replicas at their first pull, take place beside other pulls.

    Ignores: pulls that share a NIC. Equal pulls that do so finish no earlier than here; and a pull
    that waits for one NIC keeps the other one from the pulls behind it.
    """

    __slots__ = ("_free_in", "_free_out", "_met", "_path")

    def __init__(self, path: Path, *, prefill: int, decode: int) -> None:
        """Start with idle NICs, and replicas that have had no handshake."""
        self._path = path
        self._free_out = [0.0] * prefill
        self._free_in = [0.0] * decode
        self._met: set[tuple[int, int]] = set()

    def pull(self, source: int, target: int, tokens: int, now_s: float) -> float:
        """Return the end of a pull of *tokens* from prefill *source* to decode replica *target*."""
        path = self._path
        start_s = max(now_s, self._free_out[source], self._free_in[target])
        free_s, end_s = pull_times(path, tokens, start_s)
        self._free_out[source] = self._free_in[target] = free_s
        if path.handshake_s and (source, target) not in self._met:
            self._met.add((source, target))
            end_s += path.handshake_s
        return end_s
