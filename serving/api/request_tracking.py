"""One admitted request, from the door to its last token: its times, and what they teach."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from serving.api.recent_latencies import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.admission.controller import AdmissionController, AdmittedRequest
    from serving.api.metrics import Metrics
    from serving.api.recent_latencies import Measured
    from serving.protocol.phases import RequestPhases


class RequestTracker:
    """
    Stamps a request and, at its end, tells everybody who counts; ends once, however it ends.

    Of an answer in one piece the server says when its first token was there; gaps it has none.
    """

    def __init__(
        self, visit: AdmittedRequest, *, streamed: bool, started_s: float, leave: Callable[[], None]
    ) -> None:
        """Begin; *leave* is called at the end."""
        self._visit = visit
        self._streamed = streamed
        self._started_s = started_s
        self._leave = leave
        self._first_s: float | None = None
        self._last_s = started_s
        self._gaps_s: list[float] = []
        self._ended = False
        self.path = "none"
        self.outcome = "failed"
        self.tokens: tuple[int, int] | None = None

    @property
    def domain(self) -> str:
        """The domain that answers."""
        return self._visit.domain

    def count_on(self, guard: AdmissionController) -> asyncio.TimerHandle | None:
        """Free the prefill queue of an answer in one piece when its first token is due."""
        forecast = self._visit.forecast
        if self._streamed or forecast is None:
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(forecast.ttft_s, guard.state.begin, self._visit.stay)

    def begin(self, phases: RequestPhases, guard: AdmissionController, metrics: Metrics) -> float:
        """Note the first token; return when it was there, by `time.perf_counter`."""
        self.path = phases.path
        metrics.phases(phases)
        now = time.perf_counter()
        said_s = self._started_s + phases.prefill_s + phases.handoff_s
        self._first_s = now if self._streamed else min(said_s, now)
        self._last_s = now
        ttft_s = self._first_s - self._started_s
        metrics.seconds("ttft", ttft_s)
        guard.begin(self._visit, ttft_s)
        return self._first_s

    def token(self) -> None:
        """Note a chunk after the first."""
        now = time.perf_counter()
        self._gaps_s.append(now - self._last_s)
        self._last_s = now

    def end(self, guard: AdmissionController, metrics: Metrics, measured: Measured) -> None:
        """Leave; a request that was answered is measured."""
        if self._ended:
            return
        self._ended = True
        self._leave()
        tpot_s = self._tpot_s()
        guard.leave(self._visit, tpot_s)
        metrics.ended(self.path, self.outcome)
        measured.ended(self.outcome)
        if self.outcome != "ok":
            return
        e2e_s = time.perf_counter() - self._started_s
        metrics.seconds("e2e", e2e_s)
        for gap_s in self._gaps_s:
            metrics.seconds("itl", gap_s)
        if tpot_s is not None:
            metrics.seconds("tpot", tpot_s)
        if self.tokens is not None:
            metrics.tokens(*self.tokens)
        ttft_s = None if self._first_s is None else self._first_s - self._started_s
        record = Record(at_s=time.monotonic(), ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)
        measured.add(record, self._gaps_s)

    def _tpot_s(self) -> float | None:
        """Return the pace after the first token, if the stream and its count tell it."""
        if self._first_s is None or self.tokens is None:
            return None
        after = self.tokens[1] / self._visit.stay.asked.sequences - 1
        return (self._last_s - self._first_s) / after if after > 0 else None
