"""`sizing traffic`: logs, metrics and conversations as the load of a scenario."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import SET, Fault, InputError
from minicluster.files import read_text
from minicluster.workload.lengths import independent_rows, length_rows
from minicluster.workload.records import begins_as_json
from minicluster.workload.schedule import write_schedule
from minicluster.workload.trace_options import AS_FOUND, TraceReading
from minicluster.workload.trace_requests import ReadAs
from minicluster.workload.traces import read_trace
from minicluster.workload.traffic import LengthSummary, Traffic, of_arrivals
from sizing.stacks.conversations import is_conversation, read_answers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


FILES = "a trace, a log, a scrape of vLLM's metrics, or conversations as ShareGPT writes them"
"""Files that can be read, as errors name them."""

HISTOGRAMS = {"input": "vllm:request_prompt_tokens", "output": "vllm:request_generation_tokens"}
"""vLLM's histograms of lengths."""

SAMPLE = re.compile(
    r"^(?P<name>[\w:]+?)_(?P<kind>bucket|sum)(\{(?P<labels>.*)\})?\s+(?P<count>\S+)$"
)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
"""A line of a histogram, as Prometheus writes it, and a label in it."""

EQUALLY_LIKELY = 8_192
"""Lengths that stand for a histogram."""

ROWS_OF_METRICS = 256
"""Rows of lengths that are written for two histograms."""


def read_traffic(
    path: Path,
    reading: TraceReading = AS_FOUND,
    *,
    characters_per_token: float | None = None,
    trace: Path | None = None,
) -> Traffic:
    """
    Read what a file says of a load: arrivals and lengths, or lengths alone.

    Args:
        path: a trace or log (`minicluster.workload.traces`), a scrape of vLLM's metrics, or
            conversations as ShareGPT or OpenAI write them.
        reading: what decides how a trace is read, in place of the file.
        characters_per_token: for conversations, whose texts are not tokenised here.
        trace: file to write the arrivals to, which simulations and load tests take as a trace.

    Raises:
        InputError: none of these, or conversations without *characters_per_token*.
    """
    text = read_text(path, FILES)
    if is_conversation(path, text):
        traffic = _conversations(path, characters_per_token, skip_images=reading.skip_images)
    elif HISTOGRAMS["input"] in text and not begins_as_json(text):
        traffic = _metrics(text, str(path))
    else:
        read = read_trace(path, reading, skip_unanswered=True)
        traffic = of_arrivals(read, str(path))
        if trace is not None:
            write_schedule(read.arrivals.requests(), trace)
        return traffic
    if trace is not None:
        raise InputError("--out", SET, "no such option: this file has no arrivals")
    if reading.time_unit is not None:
        raise InputError("--time-unit", reading.time_unit, "no such option: this file has no times")
    return traffic


def _conversations(path: Path, characters_per_token: float | None, *, skip_images: bool) -> Traffic:
    if characters_per_token is None:
        expected = "characters of a token: texts are not tokenised here"
        raise InputError("--characters-per-token", None, expected, "English has about 4")
    if not 0.1 <= characters_per_token <= 1000:  # noqa: PLR2004  (NaN is neither)
        raise InputError("--characters-per-token", characters_per_token, "from 0.1 to 1,000")
    read = read_answers(path, skip_images=skip_images)
    if not read.lengths:
        raise InputError(str(path), Fault("holds no answer"), "conversations with answers")
    tokens = np.rint(np.array(read.lengths) / characters_per_token).astype(np.int64)
    inputs, outputs = np.maximum(1, tokens).T
    form = f"conversations: lengths alone, {characters_per_token:g} characters a token"
    return Traffic(
        requests=len(inputs),
        file=ReadAs(form=form, left_out=dict(read.left_out), unread=tuple(sorted(read.unread))),
        input_tokens=LengthSummary.of(inputs),
        output_tokens=LengthSummary.of(outputs),
        lengths=length_rows(inputs, outputs, place=str(path)),
    )


def _metrics(text: str, place: str) -> Traffic:
    buckets: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS.values()}
    totals: dict[str, float] = {}
    models: dict[str, None] = {}
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample is None or sample["name"] not in buckets:
            continue
        labels = dict(LABEL.findall(sample["labels"] or ""))
        models[labels.get("model_name", "")] = None
        try:
            count = float(sample["count"])
            if sample["kind"] == "sum":
                totals[sample["name"]] = totals.get(sample["name"], 0.0) + count
            else:
                counts, bound = buckets[sample["name"]], float(labels.get("le", "nan"))
                counts[bound] = counts.get(bound, 0.0) + count
        except ValueError:
            raise InputError(place, line, "numbers, as Prometheus writes them") from None
    if len(models) > 1:
        expected = "those of one: each model has a load of its own"
        raise InputError(place, Fault(f"has the metrics of {', '.join(models)}"), expected)
    prompts, answers = (
        _of_buckets(buckets[name], totals.get(name), f"{place}: {name}")
        for name in HISTOGRAMS.values()
    )
    return Traffic(
        requests=round(max(buckets[HISTOGRAMS["input"]].values())),
        file=ReadAs(form="vLLM's metrics: lengths alone"),
        input_tokens=LengthSummary.of(prompts),
        output_tokens=LengthSummary.of(answers),
        lengths=independent_rows(prompts, answers, ROWS_OF_METRICS),
        paired=False,
    )


def _of_buckets(counts: dict[float, float], total: float | None, place: str) -> NDArray[np.float64]:
    """
    Return equally likely lengths of a histogram, spread within its buckets so as to have its mean.

    A length lies at b + (c - b) u^(1/t - 1) between the bounds b and c of its bucket, u even from 0
    to 1; the mean over all buckets is then linear in t.

    Args:
        counts: requests up to each bound, as Prometheus counts them.
        total: tokens of all requests, the histogram's sum; `None`: the file has none.

    Raises:
        InputError: no requests, some beyond the largest bound, or a sum that the buckets cannot
            have.
    """
    bounds = np.array(sorted(counts))
    reached = np.array([counts[bound] for bound in bounds])
    if not len(reached) or not reached[-1] > 0 or np.isnan(bounds).any():
        raise InputError(place, 0, "requests that were counted", "scrape a server that has served")
    finite = np.isfinite(bounds)
    if not finite.any() or reached[finite][-1] < reached[-1]:
        raise InputError(place, "requests beyond the largest bucket", "buckets that hold them all")
    if total is None:
        expected = "the sum of the histogram, without which the buckets have no mean"
        raise InputError(f"{place}_sum", None, expected, "scrape /metrics whole")
    shares = np.diff(np.concatenate([[0.0], reached[finite]])) / reached[-1]
    upper = bounds[finite]
    lower = np.concatenate([[0.0], upper[:-1]])
    mean = total / reached[-1]
    tilt = float((mean - shares @ lower) / (shares @ (upper - lower)))
    if not 0 < tilt < 1 or shares.min() < 0:
        expected = (
            f"a sum of {reached[-1] * (shares @ lower):,.0f} to"
            f" {reached[-1] * (shares @ upper):,.0f} tokens, as its buckets say"
        )
        raise InputError(place, f"{total:,.0f} tokens", expected, "scrape once more, all of it")
    levels = (np.arange(EQUALLY_LIKELY) + 0.5) / EQUALLY_LIKELY
    ends = np.cumsum(shares)
    at = np.minimum(np.searchsorted(ends, levels), len(shares) - 1)
    inside = (levels - (ends - shares)[at]) / shares[at]
    tilted = np.clip(inside, 0.0, 1.0) ** (1 / tilt - 1)
    lengths: NDArray[np.float64] = lower[at] + (upper - lower)[at] * tilted
    return lengths
