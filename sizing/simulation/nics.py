"""Queues of KV-cache pulls at the NICs of replicas, and at the uplinks that these share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.kv_pull import pull_times

if TYPE_CHECKING:
    from sizing.simulation.system import System


class Uplinks:
    """
    Uplinks of all GPUs of a pool (docs/model.md, eq. N6).

    They carry pulls in the order in which these are asked for, also while a pull waits for a NIC:
    an uplink that another pull can use is not kept free.
    """

    __slots__ = ("_free_s", "_per_token_s")

    def __init__(self, per_token_s: float) -> None:
        """Start idle; all uplinks together take *per_token_s* a token."""
        self._free_s, self._per_token_s = 0.0, per_token_s

    def carry(self, tokens: int, now_s: float) -> float:
        """Return when the last of *tokens* has passed."""
        self._free_s = max(self._free_s, now_s) + tokens * self._per_token_s
        return self._free_s


class NicQueues:
    """
    The NICs of all replicas, and the uplinks of both pools (docs/model.md, eq. Q6 and N6).

    A pull holds the NICs of both replicas for its bytes, and while its bytes pass the uplinks. Its
    fixed part, and the handshake of two replicas at their first pull, take place beside other
    pulls.

    Ignores: pulls that share a NIC. Equal pulls that do so finish no earlier than here; and a pull
    that waits for one NIC keeps the other one from the pulls behind it.
    """

    __slots__ = ("_free_in", "_free_out", "_met", "_path", "_uplinks")

    def __init__(self, system: System) -> None:
        """Start with idle NICs, and replicas that have had no handshake."""
        pools = [pool for pool in (system.prefill, system.decode) if pool is not None]
        self._path = system.path
        self._free_out = [0.0] * pools[0].replicas
        self._free_in = [0.0] * pools[-1].replicas
        per_token_s = system.path.uplink_per_token_s
        self._uplinks = [Uplinks(per_token_s / (p.replicas * p.gpus)) for p in pools]
        self._met: set[tuple[int, int]] = set()

    def pull(self, source: int, target: int, tokens: int, now_s: float) -> float:
        """Return the end of a pull of *tokens* from prefill *source* to decode replica *target*."""
        path = self._path
        start_s = max(now_s, self._free_out[source], self._free_in[target])
        free_s, end_s = pull_times(path, tokens, start_s)
        if path.uplink_per_token_s:
            carried_s = max(each.carry(tokens, now_s) for each in self._uplinks)
            waits_s = max(0.0, carried_s - free_s)
            free_s, end_s = free_s + waits_s, end_s + waits_s
        self._free_out[source] = self._free_in[target] = free_s
        if path.handshake_s and (source, target) not in self._met:
            self._met.add((source, target))
            end_s += path.handshake_s
        return end_s
