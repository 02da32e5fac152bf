"""Samples: the measurement of one request is one line of `samples.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING

from minicluster.config import read_lines
from minicluster.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


OUTCOMES = {
    "ok": "answered",
    "shed": "shed by the server (429, 503)",
    "timeout": "timed out",
    "cut": "cut mid-stream",
    "refused": "no connection",
    "bad_status": "bad status",
    "server_error": "error in the stream",
    "malformed": "malformed stream",
    "no_usage": "stream without usage",
    "client": "client out of files or memory",
    "unfinished": "unfinished when the run ended",
}
"""Outcomes of a request, and their text in reports."""

TURNED_AWAY = ("shed", "refused", "client")
"""Outcomes of requests that reached no engine; the simulation has no admission control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """
    One request. All times are seconds from the start of the run, on the client's monotonic clock.

    Attributes:
        in_window: whether its scheduled arrival lies in the measured window.
        due_s: scheduled arrival.
        send_s: when the client began to send it; later than `due_s` by the client's own lag.
        end_s: when its stream closed, or it failed.
        input_tokens, output_tokens: what the server's `usage` says.
        chunk_s: arrival of each chunk that carried tokens.
        chunk_tokens: tokens in each of them; empty where the server sends no running total.
        outcome: one of `OUTCOMES`; `detail` says more of one that is not ok.
        phases_s: phases of TTFT as the server reports them, in the `Server-Timing` header and in
            `metrics` of the stream (vLLM). Names of `minicluster.phases`; those that another server
            uses stay as they are.
        cached_tokens: prompt tokens from the server's prefix cache; `None`: not reported.
    """

    index: int
    in_window: bool
    due_s: float
    send_s: float
    end_s: float
    asked_input_tokens: int
    asked_output_tokens: int
    input_tokens: int | None
    output_tokens: int | None
    chunk_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    outcome: str
    detail: str | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    cached_tokens: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.outcome == "ok"

    @property
    def turned_away(self) -> bool:
        """No engine saw it: the endpoint refused it (4xx, 503) or never received it."""
        # The detail of a bad status begins with the status.
        client_error = self.outcome == "bad_status" and (self.detail or "").startswith("4")
        return self.outcome in TURNED_AWAY or client_error

    @property
    def ttft_s(self) -> float:
        """Scheduled arrival to first content chunk; the SLO is judged on this one."""
        return self.chunk_s[0] - self.due_s

    @property
    def ttft_send_s(self) -> float:
        """Send to first content chunk."""
        return self.chunk_s[0] - self.send_s

    @property
    def tpot_s(self) -> float | None:
        """
        (last - first chunk) / (tokens after the first chunk); `None` if there are none.

        Of a single chunk there are none either, where the server does not say what it holds.
        Where it does not, the first chunk counts as one token.
        """
        after_first = (self.output_tokens or 0) - (self.chunk_tokens or (1,))[0]
        if after_first <= 0 or len(self.chunk_s) == 1:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / after_first

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """
        Gaps between consecutive tokens after the first chunk (ITL); their mean is the TPOT.

        Tokens of one chunk arrived together: the first of them has the whole gap, the others 0.
        """
        arrivals_s = (*self.chunk_s[:1], *self.gap_ends_s)
        return tuple(after_s - before_s for before_s, after_s in pairwise(arrivals_s))

    @property
    def gap_ends_s(self) -> tuple[float, ...]:
        """End of each of `gaps_s`: the arrival of each token after the first chunk."""
        tokens = self.chunk_tokens or (1,) * len(self.chunk_s)
        later = zip(self.chunk_s[1:], tokens[1:], strict=True)
        return tuple(at_s for at_s, count in later for _ in range(count))

    @property
    def longest_stall_s(self) -> float:
        """Longest gap; 0 without gaps."""
        return max(self.gaps_s, default=0.0)

    @property
    def e2e_s(self) -> float:
        """Scheduled arrival to last token."""
        return self.chunk_s[-1] - self.due_s


def to_line(sample: Sample) -> str:
    """Write *sample* as one line of JSON, times to the microsecond."""
    values = {column.name: getattr(sample, column.name) for column in fields(Sample)}
    row = {key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()}
    row["chunk_s"] = [round(t, 6) for t in sample.chunk_s]
    row["phases_s"] = {name: round(t, 6) for name, t in sample.phases_s.items()}
    return json.dumps(row, separators=(",", ":"))


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Read samples, in the order of the schedule; a last line without its end is skipped."""
    samples = read_lines(Sample, path, "samples written by `loadtest run`", torn=True)
    return tuple(sorted(samples, key=lambda sample: sample.index))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """The verdict on a run, of whose requests those that are due from `start_s` on count."""

    verdict: str
    reasons: tuple[str, ...]
    start_s: float


def read_run_verdict(path: Path) -> RunVerdict | None:
    """Read a verdict, or refuse a file that holds none; `None` if there is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return RunVerdict(
            verdict=str(document["verdict"]),
            reasons=tuple(map(str, document["reasons"])),
            start_s=float(document["window"]["start_s"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: verdict, reasons, window.start_s",
            f"{error}"[:80],
            "a verdict as `loadtest run` writes it",
            "`loadtest report` writes it anew",
        ) from None
