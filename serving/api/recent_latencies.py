"""What the last answers took, for people to look at."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minicluster.specs.slo import PERCENTILES
from minicluster.stats.quantiles import summarise

if TYPE_CHECKING:
    from collections.abc import Iterable

LAST = 1_000
LAST_GAPS = 10_000
"""Answers, and gaps between their tokens, that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One answer: seconds, `None` where there was none; `at_s`: its end, monotonic."""

    at_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


class Measured:
    """The last answers, and how many requests ended how."""

    def __init__(self) -> None:
        """Start with none."""
        self._last: deque[Record] = deque(maxlen=LAST)
        self._gaps_s: deque[float] = deque(maxlen=LAST_GAPS)
        self._outcomes: Counter[str] = Counter()

    def add(self, record: Record, gaps_s: Iterable[float]) -> None:
        """Note an answer and the gaps between its tokens."""
        self._last.append(record)
        self._gaps_s.extend(gaps_s)

    def ended(self, outcome: str) -> None:
        """Count a request."""
        self._outcomes[outcome] += 1

    def summary(self) -> dict[str, Any]:
        """Return percentiles of every latency, the rate, and the outcomes, as plain data."""
        last = list(self._last)
        span_s = last[-1].at_s - last[0].at_s if len(last) > 1 else 0.0
        return {
            "answers": len(last),
            "requests_per_s": (len(last) - 1) / span_s if span_s > 0 else None,
            "outcomes": dict(self._outcomes),
            **{
                name: _statistics([value for r in last if (value := getattr(r, f"{name}_s"))])
                for name in ("ttft", "tpot", "e2e")
            },
            "itl": _statistics(list(self._gaps_s)),
        }


def _statistics(values: list[float]) -> dict[str, float] | None:
    """Return mean and percentiles; `None` where there is nothing."""
    found = summarise(values)
    return None if found is None else {f"{name}_s": found.at(name) for name in PERCENTILES}
