"""The one record of a request: filled in while it is answered, and reported when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from serving.api.gate import AnswerReport, Tickets
from serving.protocol.messages import RequestPhases, RequestRefused

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.requests import Request

RECORD = "minicluster.record"
"""Key of a request's record in its ASGI scope."""

CLIENT_GONE = 499
"""Status, as nginx writes it, of a request whose client was gone before the answer began."""


@dataclass(slots=True, kw_only=True)
class AnswerRecord:
    """
    One request; times by `time.perf_counter`.

    As a context, an admitted request ends with an exception, and otherwise goes on.

    Attributes:
        key: name of the API key, never the key.
        outcome: as in `minicluster_requests_total`; empty where nothing was generated.
        error: code of the error that it was answered with.
        gate: what has admitted it; `None`: it is not admitted.
        ticket: its number there.
        on_end: is called when it ends.
        domain: the domain that answers it.
        streamed: whether its answer comes in events; one in one piece has no gaps, and the backend
            reports when its first token was there.
        sequences: answers of which the tokens are.
        admitted_s, first_s, last_s: when it was admitted, and its first and its last token came.
        gaps_s: between the chunks of a stream.
        prompt_tokens, output_tokens: as the engine counts them; `None` until it reports them.
    """

    started_s: float
    request_id: str
    key: str = ""
    status: int = CLIENT_GONE
    outcome: str = ""
    error: str = ""
    gate: Tickets | None = None
    ticket: int = 0
    on_end: Callable[[], None] | None = None
    domain: str = ""
    streamed: bool = False
    sequences: int = 1
    phases: RequestPhases | None = None
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request to its first token."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, if the answer has been counted."""
        if self.first_s is None or self.last_s is None or self.output_tokens is None:
            return None
        after = self.output_tokens / self.sequences - 1
        return (self.last_s - self.first_s) / after if after > 0 else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the request to its last token."""
        return None if self.last_s is None else self.last_s - self.started_s

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

    def admit(
        self, gate: Tickets, ticket: int, *, domain: str, sequences: int, streamed: bool
    ) -> None:
        """Take note that *gate* has admitted it, by the number *ticket*."""
        self.gate, self.ticket, self.domain = gate, ticket, domain
        self.sequences, self.streamed = sequences, streamed
        self.admitted_s = time.perf_counter()

    def first_token(self, phases: RequestPhases) -> None:
        """Record the first token."""
        now_s = time.perf_counter()
        reported_s = self.started_s + phases.prefill_s + phases.decode_s
        self.first_s = now_s if self.streamed else min(reported_s, now_s)
        self.phases, self.last_s = phases, now_s
        assert self.gate is not None  # noqa: S101  (only admitted requests have one)
        self.gate.first_token(self.ticket, phases, self.first_s - self.started_s)

    def token(self) -> None:
        """Record a chunk after the first."""
        now_s = time.perf_counter()
        self.gaps_s.append(now_s - (self.last_s or now_s))
        self.last_s = now_s

    def count(self, usage: Any) -> None:  # noqa: ANN401  (whatever the engine sends)
        """Take the tokens of a usage object."""
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")

    def end(self, outcome: str) -> None:
        """Report the end of an admitted request; later calls change nothing."""
        if self.outcome:
            return
        self.outcome = outcome
        assert self.gate is not None  # noqa: S101  (only admitted requests end)
        report = AnswerReport(
            outcome=outcome,
            path="none" if self.phases is None else self.phases.path,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            e2e_s=self.e2e_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            gaps_s=self.gaps_s,
        )
        self.gate.ended(self.ticket, report)
        if self.on_end is not None:
            self.on_end()


def record_of(request: Request) -> AnswerRecord:
    """Return the record of a request."""
    record: AnswerRecord = request.scope[RECORD]
    return record
