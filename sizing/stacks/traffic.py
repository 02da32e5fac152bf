"""`sizing traffic`: logs, metrics and conversations as the load of a scenario."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import Fault, InputError
from minicluster.files import read_text
from minicluster.workload.lengths import independent_rows, length_rows
from minicluster.workload.records import begins_as_json
from minicluster.workload.trace_options import TraceReading
from minicluster.workload.trace_requests import ReadAs
from minicluster.workload.traces import AS_FOUND, read_trace, write_trace
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
    r'^(?P<name>[\w:]+?)_(?P<kind>bucket|sum)(\{(.*?\ble="(?P<le>[^"]+)")?.*\})?\s+(?P<count>\S+)$'
)
"""A line of a histogram, as Prometheus writes it."""

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
        found = _conversations(path, characters_per_token, skip_images=reading.skip_images)
    elif HISTOGRAMS["input"] in text and not begins_as_json(text):
        found = _metrics(text, str(path))
    else:
        read = read_trace(path, reading, skip_unanswered=True)
        found = of_arrivals(read, str(path))
        if trace is not None:
            write_trace(read.arrivals, trace)
        return found
    if trace is not None:
        raise InputError("--out", str(trace), "a file with arrivals, which this one has not")
    if reading not in {TraceReading(), TraceReading(skip_images=True)}:
        expected = "no --format, --time-unit or --block-tokens: they are of traces"
        raise InputError(str(path), found.file.form, expected)
    return found


def _conversations(path: Path, characters_per_token: float | None, *, skip_images: bool) -> Traffic:
    """Read conversations: a prompt is all that came before an answer."""
    if characters_per_token is None:
        expected = "characters of a token: texts are not tokenised here"
        raise InputError("--characters-per-token", None, expected, "English has about 4")
    if not 0.1 <= characters_per_token <= 1000:  # noqa: PLR2004  (NaN is neither)
        raise InputError("--characters-per-token", characters_per_token, "from 0.1 to 1,000")
    all_of_them, unread = read_answers(path, skip_images=skip_images)
    texts = [each for each in all_of_them if each.is_text]
    answered = [(each.before, each.own) for each in texts if each.before and each.own]
    if not answered:
        raise InputError(str(path), Fault("holds no answer"), "conversations with answers")
    prompts, answers = zip(*answered, strict=True)
    inputs, outputs = (
        np.maximum(1, np.rint(np.array(each) / characters_per_token)).astype(np.int64)
        for each in (prompts, answers)
    )
    left_out = {
        "answers to images, audio or video": len(all_of_them) - len(texts),
        "answers that are empty, or to nothing": len(texts) - len(answered),
    }
    return Traffic(
        requests=len(answered),
        file=ReadAs(
            form=f"conversations: lengths alone, {characters_per_token:g} characters a token",
            left_out=left_out,
            unread=unread,
        ),
        input_tokens=LengthSummary.of(inputs),
        output_tokens=LengthSummary.of(outputs),
        lengths=length_rows(inputs, outputs, place=str(path)),
    )


def _metrics(text: str, place: str) -> Traffic:
    buckets: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS.values()}
    totals: dict[str, float] = {}
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample is None or sample["name"] not in buckets:
            continue
        try:
            count = float(sample["count"])
            if sample["kind"] == "sum":
                totals[sample["name"]] = totals.get(sample["name"], 0.0) + count
            else:
                counts, bound = buckets[sample["name"]], float(sample["le"] or "nan")
                counts[bound] = counts.get(bound, 0.0) + count
        except ValueError:
            raise InputError(place, line, "numbers, as Prometheus writes them") from None
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
