"""When the KV cache of a prompt has crossed from one replica to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sizing.simulation.system import Path


class TransferLinks:
    """
    The NICs of all replicas (docs/model.md, eq. Q6).

    A pull holds the NICs of both replicas for its bytes; its fixed part and the handshake of two
    replicas that meet for the first time pass beside other pulls.

    Ignores: sharing. NICs that carry several pulls at a time finish none of them earlier than here
    if they are equal; and a pull that waits for one NIC keeps the other one from those behind it.
    """

    __slots__ = ("_free_in", "_free_out", "_met", "_path")

    def __init__(self, path: Path, *, prefill: int, decode: int) -> None:
        """Start with idle links, and replicas that do not know each other."""
        self._path = path
        self._free_out = [0.0] * prefill
        self._free_in = [0.0] * decode
        self._met: set[tuple[int, int]] = set()

    def pull(self, source: int, target: int, tokens: int, now_s: float) -> float:
        """Carry *tokens* from prefill replica *source* to decode replica *target*; return when."""
        path = self._path
        extra_s = path.transfer_base_s
        if path.handshake_s and (source, target) not in self._met:
            self._met.add((source, target))
            extra_s += path.handshake_s
        wire_s = tokens * path.transfer_per_token_s
        if path.nics == "free":
            return now_s + wire_s + extra_s
        start_s = max(now_s, self._free_out[source], self._free_in[target])
        self._free_out[source] = self._free_in[target] = start_s + wire_s
        return start_s + wire_s + extra_s
