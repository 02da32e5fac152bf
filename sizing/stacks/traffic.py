"""`sizing traffic`: logs, metrics and conversations as the load of a scenario."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.errors import InputError
from minicluster.files import read_text
from minicluster.workload.traces import Trace, read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


WINDOW_S = 300.0
"""Window in which the busiest rate is counted: shorter bursts are what the simulation draws."""

HOLE_CHANCE = 1e-6
"""Chance of a gap, if arrivals were even over the file, below which the gap is a hole."""

FILES = "a trace, a log, a scrape of vLLM's metrics, or conversations as ShareGPT writes them"
"""Files that can be read, as errors name them."""

HISTOGRAMS = {"input": "vllm:request_prompt_tokens", "output": "vllm:request_generation_tokens"}
"""vLLM's histograms of lengths."""

ANSWERING = {"gpt", "assistant", "chatgpt", "bing", "bard"}
"""Names of who answers in ShareGPT's conversations."""

SAMPLE = re.compile(r'^(?P<name>[\w:]+)_bucket\{.*?le="(?P<le>[^"]+)".*\}\s+(?P<count>\S+)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """
    Lengths in tokens.

    Attributes:
        sigma: standard deviation of the logarithm; with `median` and `longest` the lognormal
            distribution that a scenario takes.
    """

    median: float
    mean: float
    p99: float
    longest: int
    sigma: float

    @property
    def toml(self) -> str:
        """The distribution as a scenario's value."""
        if self.sigma < 0.01:  # noqa: PLR2004  (a hundredth: as good as fixed)
            return str(max(1, round(self.median)))
        return (
            f'{{ distribution = "lognormal", median = {self.median:.4g}, sigma = {self.sigma:.3g},'
            f" high = {self.longest} }}"
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
        requests: counted; 0: unknown.
        skipped: lines or requests without tokens.
        span_s: from the first arrival to the last, holes left out; `None`: not in the file.
        mean_per_s: requests per second over the span.
        busiest_per_s: the highest rate of a window of `WINDOW_S`.
        gap_cv: coefficient of variation of the gaps; 1 of Poisson arrivals.
        holes: begin and seconds of gaps that no even traffic has.
    """

    requests: int
    skipped: int
    input_tokens: LengthSummary
    output_tokens: LengthSummary
    span_s: float | None = None
    mean_per_s: float | None = None
    busiest_per_s: float | None = None
    gap_cv: float | None = None
    holes: tuple[tuple[float, float], ...] = ()

    @property
    def keys(self) -> dict[str, str]:
        """Keys of the table `[workload]`, and their values as TOML, at the busiest rate."""
        rate = {} if self.busiest_per_s is None else {"requests_per_s": f"{self.busiest_per_s:.4g}"}
        lengths = {"input_tokens": self.input_tokens.toml, "output_tokens": self.output_tokens.toml}
        return rate | lengths

    def to_toml(self) -> str:
        """Write the table `[workload]` of a scenario."""
        return "[workload]\n" + "".join(f"{key} = {text}\n" for key, text in self.keys.items())

    def lines(self) -> list[str]:
        """Say what the table does not."""
        skipped = f", {self.skipped:,} without tokens left out" if self.skipped else ""
        lines = [
            f"{self.requests:,} requests{skipped}",
            f"prompts: {self.input_tokens}",
            f"answers: {self.output_tokens}",
        ]
        if self.span_s is None or self.mean_per_s is None or self.busiest_per_s is None:
            return [
                *lines,
                "no arrivals in it: the rate, workload.requests_per_s, is yours to give",
            ]
        lines.append(
            f"{self.mean_per_s:.3g} requests/s over {self.span_s:,.0f} s; the busiest 5 minutes"
            f" have {self.busiest_per_s:.3g}, which the load takes; coefficient of variation of the"
            f" gaps {self.gap_cv:.2g} (Poisson: 1)"
        )
        lines += [
            f"a hole of {seconds:,.0f} s after {begin:,.0f} s: not counted as time"
            for begin, seconds in self.holes
        ]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return all figures, and the table."""
        return asdict(self) | {"toml": self.to_toml()}


def read_traffic(
    path: Path, *, characters_per_token: float | None = None, trace: Path | None = None
) -> Traffic:
    """
    Read what a file says of a load: arrivals and lengths, or lengths alone.

    Args:
        path: a trace or log (`minicluster.workload.traces`), a scrape of vLLM's metrics, or
            conversations as ShareGPT writes them.
        characters_per_token: for conversations, whose texts are not tokenised here.
        trace: file to write the arrivals to, which simulations and load tests take as a trace.

    Raises:
        InputError: none of these, or conversations without *characters_per_token*.
    """
    text = read_text(path, FILES)
    if text.lstrip().startswith("["):
        found = _conversations(text, str(path), characters_per_token)
    elif HISTOGRAMS["input"] in text:
        found = _metrics(text, str(path))
    else:
        read = read_trace(path, skip_unanswered=True)
        found = of_arrivals(read)
        if trace is not None:
            write_trace(read.arrivals, trace)
        return found
    if trace is not None:
        raise InputError("--out", str(trace), "a file with arrivals, which this one has not")
    return found


def of_arrivals(read: Trace) -> Traffic:
    """Describe arrivals; holes are named, and count neither as time nor as gaps."""
    arrivals = read.arrivals
    due, count = arrivals.due_s, len(arrivals)
    gaps = np.diff(due)
    known = Traffic(
        requests=count,
        skipped=read.skipped,
        input_tokens=_summary(arrivals.input_tokens),
        output_tokens=_summary(arrivals.output_tokens),
    )
    if not len(gaps) or not gaps.sum():
        return known
    typical_s = float(np.median(gaps)) / math.log(2) or float(gaps.mean())
    is_hole = gaps > max(WINDOW_S, -math.log(HOLE_CHANCE / count) * typical_s)
    own = gaps[~is_hole]
    span_s = float(own.sum())
    holes = zip(due[:-1][is_hole].tolist(), gaps[is_hole].tolist(), strict=True)
    # Requests of each window that begins with an arrival.
    window_s = min(WINDOW_S, span_s)
    starting = np.searchsorted(due, due + window_s, side="left") - np.arange(count)
    return replace(
        known,
        span_s=span_s,
        mean_per_s=len(own) / span_s,
        busiest_per_s=float(starting.max()) / window_s,
        gap_cv=float(own.std() / own.mean()),
        holes=tuple(holes),
    )


def _summary(tokens: NDArray[np.int64]) -> LengthSummary:
    logs = np.log(tokens)
    return LengthSummary(
        median=float(np.median(tokens)),
        mean=float(tokens.mean()),
        p99=float(np.quantile(tokens, 0.99)),
        longest=int(tokens.max()),
        sigma=float(logs.std()),
    )


def _conversations(text: str, place: str, characters_per_token: float | None) -> Traffic:
    """Read conversations: a prompt is all that came before an answer."""
    if characters_per_token is None:
        expected = "characters of a token: texts are not tokenised here"
        raise InputError("--characters-per-token", None, expected, "English has about 4")
    if not 0.1 <= characters_per_token <= 1000:  # noqa: PLR2004  (NaN is neither)
        raise InputError("--characters-per-token", characters_per_token, "from 0.1 to 1,000")
    try:
        turns = [pair for each in json.loads(text) for pair in _answers(each["conversations"])]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        expected = 'a list of {"conversations": [{"from": …, "value": …}]}'
        raise InputError(place, repr(error), expected) from None
    answered = [(before, answer) for before, answer in turns if before and answer]
    if not answered:
        raise InputError(place, "no answer", "conversations with answers")
    prompts, answers = zip(*answered, strict=True)
    inputs, outputs = (
        np.maximum(1, np.rint(np.array(each) / characters_per_token)).astype(np.int64)
        for each in (prompts, answers)
    )
    return Traffic(
        requests=len(answered),
        skipped=len(turns) - len(answered),
        input_tokens=_summary(inputs),
        output_tokens=_summary(outputs),
    )


def _answers(turns: list[dict[str, str]]) -> Iterator[tuple[int, int]]:
    """Yield the characters before each answer, and its own."""
    before = 0
    for turn in turns:
        length = len(turn["value"])
        if turn["from"] in ANSWERING:
            yield before, length
        before += length


def _metrics(text: str, place: str) -> Traffic:
    found: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS.values()}
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample and sample["name"] in found:
            counts = found[sample["name"]]
            try:
                bound, count = float(sample["le"]), float(sample["count"])
            except ValueError:
                raise InputError(place, line, "numbers, as Prometheus writes them") from None
            counts[bound] = counts.get(bound, 0.0) + count
    summaries = {
        key: _of_buckets(found[name], f"{place}: {name}") for key, name in HISTOGRAMS.items()
    }
    requests = round(max(found[HISTOGRAMS["input"]].values()))
    return Traffic(
        requests=requests, skipped=0,
        input_tokens=summaries["input"], output_tokens=summaries["output"],
    )  # fmt: skip


def _of_buckets(counts: dict[float, float], place: str) -> LengthSummary:
    """Fit a lognormal distribution to a histogram's quartiles, geometric within a bucket."""
    bounds = np.array(sorted(counts))
    totals = np.array([counts[bound] for bound in bounds])
    if not len(totals) or totals[-1] <= 0:
        raise InputError(place, 0, "requests that were counted", "scrape a server that has served")
    finite = np.isfinite(bounds)
    if not finite.any() or totals[finite][-1] < totals[-1]:
        raise InputError(place, "requests beyond the largest bucket", "buckets that hold them all")
    bounds, shares = bounds[finite], totals[finite] / totals[-1]
    logs = np.log(np.maximum(bounds, 1.0))

    def at(share: float) -> float:
        return float(np.interp(share, shares, logs))

    sigma = max(0.0, (at(0.75) - at(0.25)) / (2 * 0.67449))  # quartiles of the normal distribution
    median = math.exp(at(0.5))
    return LengthSummary(
        median=median,
        mean=median * math.exp(sigma**2 / 2),
        p99=math.exp(at(0.99)),
        longest=int(bounds[np.searchsorted(shares, 1.0 - 1e-12)]),
        sigma=sigma,
    )
