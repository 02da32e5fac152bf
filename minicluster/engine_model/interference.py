"""Steps of two pools on the same cores, where each pool slows the other down (eq. Q9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.step_seconds import PlannedStep

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from minicluster.engine_model.replica import Replica
    from minicluster.specs.step import Interference, StepSpec


class PrefillWithInterference(PlannedStep):
    """
    A prefill step on cores that a decode pool uses too (docs/model.md, eq. Q9).

        t_p = t_p,alone (1 + f_p + L g_p) + h_p, L as it is when the step begins
    """

    __slots__ = ("_interference", "decode")

    def __init__(self, spec: StepSpec, interference: Interference) -> None:
        """Keep the constants; the run sets *decode*."""
        super().__init__(spec)
        self._interference = interference
        self.decode: Sequence[Replica] = ()

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """See `StepTime`."""
        chunks = tuple(chunks)
        alone_s = super().step_s(chunks, batch, context)
        interference = self._interference
        sequences = sum(replica.batch for replica in self.decode) / (len(self.decode) or 1)
        slower = (
            interference.prefill_fraction + sequences * interference.prefill_per_sequence_fraction
        )
        return alone_s * (1 + slower) + interference.prefill_per_request_s * len(chunks)


class DecodeWithInterference(PlannedStep):
    """
    A decode step on cores that a prefill pool uses too (docs/model.md, eq. Q9).

        t_d = t_d,alone (1 + u f_d), and h_d in parts for each request that is to join the batch
    """

    __slots__ = ("_interference", "join_delay_s", "prefill")

    def __init__(self, spec: StepSpec, interference: Interference) -> None:
        """Keep the constants; the run sets *prefill*."""
        super().__init__(spec)
        self._interference = interference
        self.join_delay_s = interference.decode_per_request_s
        self.prefill: Sequence[Replica] = ()

    def decode_line(self, batch: int) -> tuple[float, float]:
        """See `StepTime`."""
        slower = 1 + self._busy() * self._interference.decode_fraction
        fixed_s, per_token_s = super().decode_line(batch)
        return fixed_s * slower, per_token_s * slower

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """See `StepTime`."""
        alone_s = super().step_s(chunks, batch, context)
        return alone_s * (1 + self._busy() * self._interference.decode_fraction)

    def _busy(self) -> float:
        """Share of the prefill replicas that compute at the moment."""
        return sum(replica.active for replica in self.prefill) / (len(self.prefill) or 1)
