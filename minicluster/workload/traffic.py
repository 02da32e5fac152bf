"""What arrivals say of a load: rate, lengths and bursts, and the table of a scenario."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.specs.workload import LengthRow
from minicluster.workload.lengths import length_rows
from minicluster.workload.trace_requests import ReadAs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.workload.traces import Trace

WINDOW_S = 300.0
"""Window in which the busiest rate is counted: shorter bursts are what the simulation draws."""

HOLE_CHANCE = 1e-6
"""Chance of a gap, if arrivals were even over the file, below which the gap is a hole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Lengths in tokens."""

    median: float
    mean: float
    p99: float
    longest: int

    @classmethod
    def of(cls, tokens: NDArray[np.int64] | NDArray[np.float64]) -> LengthSummary:
        """Describe lengths, shape (n,)."""
        return cls(
            median=float(np.median(tokens)),
            mean=float(tokens.mean()),
            p99=float(np.quantile(tokens, 0.99)),
            longest=int(tokens.max()),
        )

    def __str__(self) -> str:
        """Write the percentiles."""
        return (
            f"median {self.median:,.0f}, mean {self.mean:,.0f}, p99 {self.p99:,.0f},"
            f" longest {self.longest:,} tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """
    What a file says of a load.

    Attributes:
        requests: number of them; 0: unknown.
        lengths: rows as in `WorkloadSpec.lengths`.
        paired: whether prompts and answers are known together.
        span_s: from the first arrival to the last, holes left out; `None`: not in the file.
        busiest_per_s: the highest rate of a window of `WINDOW_S`.
        gap_cv: coefficient of variation of the gaps; 1 of Poisson arrivals.
        holes: begin and seconds of gaps that no even traffic has.
    """

    requests: int
    input_tokens: LengthSummary
    output_tokens: LengthSummary
    lengths: tuple[LengthRow, ...]
    file: ReadAs
    paired: bool = True
    span_s: float | None = None
    mean_per_s: float | None = None
    busiest_per_s: float | None = None
    gap_cv: float | None = None
    holes: tuple[tuple[float, float], ...] = ()

    @property
    def skipped(self) -> int:
        """Number of all that was left out."""
        return sum(self.file.left_out.values())

    @property
    def keys(self) -> dict[str, str]:
        """Keys of the table `[workload]`, and their values as TOML, at the busiest rate."""
        rate = {} if self.busiest_per_s is None else {"requests_per_s": f"{self.busiest_per_s:.4g}"}
        if len(self.lengths) == 1:
            ((prompt, answer, _),) = self.lengths
            return rate | {"input_tokens": str(prompt), "output_tokens": str(answer)}
        rows = textwrap.fill(", ".join(f"[{n},{o},{count}]" for n, o, count in self.lengths), 96)
        return rate | {"lengths": f"[\n{rows}\n]" if "\n" in rows else f"[{rows}]"}

    def to_toml(self) -> str:
        """Write the table `[workload]` of a scenario."""
        return "[workload]\n" + "".join(f"{key} = {text}\n" for key, text in self.keys.items())

    def lines(self) -> list[str]:
        """Say what the table does not."""
        together = (
            "prompt and answer of a request together"
            if self.paired
            else "prompts and answers apart, because the file does not say which belong together"
        )
        lines = [
            *self.file.lines(),
            f"{self.requests:,} request{'s' * (self.requests != 1)}",
            f"prompts: {self.input_tokens}",
            f"answers: {self.output_tokens}",
        ]
        if len(self.lengths) > 1:
            lines.append(f"lengths: {len(self.lengths):,} rows, {together}")
        if self.span_s is None:
            return [*lines, "no arrivals are in it: give the rate, workload.requests_per_s"]
        span = f"{self.span_s:{',.0f' if self.span_s > WINDOW_S else '.3g'}}"
        return [
            *lines,
            f"{self.mean_per_s:.3g} requests/s over {span} s",
            f"the busiest 5 minutes have {self.busiest_per_s:.3g}/s, which the load takes",
            f"coefficient of variation of the gaps: {self.gap_cv:.2g} (Poisson: 1)",
            *(
                f"a hole of {seconds:,.0f} s after {begin:,.0f} s, which does not count as time"
                for begin, seconds in self.holes
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all figures, and the table."""
        return asdict(self) | {"skipped": self.skipped, "toml": self.to_toml()}


def of_arrivals(read: Trace, place: str) -> Traffic:
    """Describe arrivals; holes are named, and count neither as time nor as gaps."""
    arrivals = read.arrivals
    due, count = arrivals.due_s, len(arrivals)
    gaps = np.diff(due)
    traffic = Traffic(
        requests=count,
        file=read.file,
        input_tokens=LengthSummary.of(arrivals.input_tokens),
        output_tokens=LengthSummary.of(arrivals.output_tokens),
        lengths=length_rows(arrivals.input_tokens, arrivals.output_tokens, place=place),
    )
    if not len(gaps) or not gaps.sum():
        return traffic
    typical_s = float(np.median(gaps)) / math.log(2) or float(gaps.mean())
    is_hole = gaps > max(WINDOW_S, -math.log(HOLE_CHANCE / count) * typical_s)
    # Bursts of one second each, an hour apart, have no other time than that between them.
    is_hole &= gaps[~is_hole].sum() > 0
    own = gaps[~is_hole]
    span_s = float(own.sum())
    holes = zip(due[:-1][is_hole].tolist(), gaps[is_hole].tolist(), strict=True)
    # Requests of each window that begins with an arrival.
    window_s = min(WINDOW_S, span_s)
    starting = np.searchsorted(due, due + window_s, side="left") - np.arange(count)
    return replace(
        traffic,
        span_s=span_s,
        mean_per_s=len(own) / span_s,
        busiest_per_s=float(starting.max()) / window_s,
        gap_cv=float(own.std() / own.mean()),
        holes=tuple(holes),
    )
