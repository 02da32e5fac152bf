"""The times of one admitted request, reported once to admission control and to the metrics."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

from serving.api.metrics import MeasuredAnswer
from serving.api.streams import UsageReader
from serving.protocol.messages import RequestRefused

if TYPE_CHECKING:
    from types import TracebackType

    from serving.admission.controller import AdmissionController, InflightRequest
    from serving.api.metrics import Metrics
    from serving.protocol.messages import RequestPhases


class RequestTracker:
    """
    One admitted request; as a context it ends with an exception, and otherwise goes on.

    For an answer in one piece the backend reports when its first token was there; it has no gaps.
    """

    def __init__(
        self,
        request: InflightRequest,
        admission: AdmissionController,
        metrics: Metrics,
        *,
        streamed: bool,
        started_s: float,
    ) -> None:
        """Start; *started_s* by `time.perf_counter`."""
        self.usage = UsageReader()
        self._request = request
        self._admission = admission
        self._metrics = metrics
        self._streamed = streamed
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._gaps_s: list[float] = []
        self._ended = False
        self._path = "none"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End the request if it was refused, failed or was cancelled."""
        if isinstance(error, RequestRefused):
            self.end("failed" if error.refusal.status >= 500 else "refused")  # noqa: PLR2004
        elif error is not None:
            self.end("failed" if isinstance(error, Exception) else "cancelled")

    @property
    def domain(self) -> str:
        """The domain that answers."""
        return self._request.domain

    def expect_first_token(self) -> asyncio.TimerHandle | None:
        """Remove an answer in one piece from the prefill backlog when its first token is due."""
        forecast = self._request.forecast
        if self._streamed or forecast is None:
            return None
        on_time = self._admission.inflight.first_token
        return asyncio.get_running_loop().call_later(forecast.ttft_s, on_time, self._request)

    def first_token(self, phases: RequestPhases) -> float:
        """Record the first token; return when it was there, by `time.perf_counter`."""
        self._path = phases.path
        now = time.perf_counter()
        reported_s = self._started_s + phases.prefill_s + phases.decode_s
        self._first_s = now if self._streamed else min(reported_s, now)
        self._last_s = now
        ttft_s = self._first_s - self._started_s
        self._metrics.first_token(ttft_s, phases)
        self._admission.first_token(self._request, ttft_s)
        return self._first_s

    def token(self) -> None:
        """Record a chunk after the first."""
        now = time.perf_counter()
        self._gaps_s.append(now - self._last_s)
        self._last_s = now

    def end(self, outcome: str) -> None:
        """Report the request; later calls change nothing. Only a complete answer is measured."""
        if self._ended:
            return
        self._ended = True
        usage, answer = self.usage, None
        tpot_s = self._tpot_s()
        self._admission.end(self._request, tpot_s, usage.prompt_tokens)
        if outcome == "ok" and self._first_s is not None:
            answer = MeasuredAnswer(
                ttft_s=self._first_s - self._started_s,
                tpot_s=tpot_s,
                e2e_s=time.perf_counter() - self._started_s,
                gaps_s=self._gaps_s,
                prompt_tokens=usage.prompt_tokens or 0,
                output_tokens=usage.output_tokens or 0,
            )
        self._metrics.ended(self._path, outcome, answer)

    def _tpot_s(self) -> float | None:
        """Return the time per token after the first, if the answer has been counted."""
        if self._first_s is None or self.usage.output_tokens is None:
            return None
        after = self.usage.output_tokens / self._request.cost.sequences - 1
        return (self._last_s - self._first_s) / after if after > 0 else None
