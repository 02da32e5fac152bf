"""The verdict of a run and its reasons: met, missed, inconclusive, invalid, failed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from loadtest.run.client_health import KILLED, LOST_WORKER, Health
from minicluster.stats.shares import LEVELS, samples_needed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.run.folder import Run
    from loadtest.verdict.slo import SloResult
    from loadtest.verdict.window import CountedPart, MeasurementWindow
    from minicluster.workload.samples import Sample


MAX_WRONG_FRACTION = 0.01
"""Largest fraction of answers with another length than requested: a p99 still holds."""

Pairs = list[tuple[int, int]]


def wrong_lengths(measured: Sequence[Sample]) -> list[str]:
    """Return why lengths make a run invalid, by side; one that is not told is not wrong."""
    problems = []
    for side, lengths in _sides(measured).items():
        wrong = [(got, asked) for got, asked in lengths if got != asked]
        if len(wrong) > MAX_WRONG_FRACTION * len(lengths):
            got, asked = wrong[0]
            problems.append(
                f"{len(wrong)} of {len(lengths)} answers have another {side} length than "
                f"requested (first: {got} tokens, not {asked}); does the endpoint honour "
                "`ignore_eos`? (--plain takes lengths as they come)"
            )
    return problems


def lengths_text(measured: Sequence[Sample], *, planned: bool) -> str:
    """Say by how much lengths differ from those of the plan, or of the options."""
    whose = "the plan's" if planned else "those asked for"
    parts = []
    for side, lengths in _sides(measured).items():
        got, asked = (sum(counts) / len(lengths) for counts in zip(*lengths, strict=True))
        same = sum(one == other for one, other in lengths)
        if same == len(lengths):
            parts.append(f"{side} as asked for")
            continue
        parts.append(
            f"{side} {got:.1f} tokens on average, {got / asked - 1:+.1%} against {whose} "
            f"({asked:.1f}; {same} of {len(lengths)} are equal)"
        )
    sides = "; ".join(parts) or "no answer told them"
    return f"--plain: lengths are as the server gave them: {sides}"


def _sides(measured: Sequence[Sample]) -> dict[str, Pairs]:
    """Return (counted, asked) of each answer that tells its length, by side."""
    answered = [s for s in measured if s.ok]
    pairs = {
        "input": [(s.input_tokens, s.asked_input_tokens) for s in answered],
        "output": [(s.output_tokens, s.asked_output_tokens) for s in answered],
    }
    counted = {
        side: [(got, asked) for got, asked in lengths if got is not None]
        for side, lengths in pairs.items()
    }
    return {side: lengths for side, lengths in counted.items() if lengths}


MAX_NOT_SENT_FRACTION = 0.01
"""Largest fraction of the scheduled requests that the client may fail to send."""

MAX_CACHED_FRACTION = 0.05
"""Largest fraction of prompt tokens from the prefix cache beyond what the workload shares."""

MAX_EXTENSION_MINUTES = 24 * 60  # longest extension of a run that a message suggests


def decide(
    run: Run, window: MeasurementWindow, results: tuple[SloResult, ...], health: Health
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict and its reasons; a reason that makes a run invalid takes precedence."""
    measured = window.sent
    if run.client.stop == "died":
        died_s = max((s.chunk_s[-1] for s in run.samples if s.chunk_s), default=0.0)
        return "failed", (f"{run.job.host} stopped answering {died_s:.1f} s into the run",)
    if run.client.stop == LOST_WORKER:
        lost = (
            f"the load client was {LOST_WORKER}: one of its processes ended or was silent for 5 s"
        )
        return "invalid", (f"{lost}; the samples so far are kept",)
    if run.cut_short:
        return "interrupted", (_interruption(run),)
    if not any(s.ok for s in measured):
        detail = next((s.detail for s in measured if s.detail), "no answer")
        return "failed", (f"{run.job.host} answered no request: {detail}",)
    if problems := _invalid(run, window, measured, health):
        return "invalid", tuple(problems)
    return slo_verdict(window.counted, results)


def _interruption(run: Run) -> str:
    stop, planned = run.client.stop, sum(request.in_window for request in run.schedule)
    if run.job.shape.closed:
        planned = min(planned, run.job.num_requests)
    cause = ""
    if stop == KILLED:
        cause = " (the load client wrote no report of its own: killed, or its disk was full)"
    part = f"{stop} after {len(run.measured)} of {planned} requests{cause}"
    return f"{part}: the limits are judged on those that were sent"


def slo_verdict(
    counted: CountedPart, results: tuple[SloResult, ...]
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict of a valid run, and its reasons."""
    missed = [r for r in results if r.verdict == "missed"]
    if missed:
        return "missed", tuple(map(_miss, missed))
    if counted.rising and any(r.attained_fraction < LEVELS[r.percentile] for r in results):
        return "missed", ("latencies rise to the end: more requests arrive than are answered",)
    if not counted.settled:
        return "inconclusive", ("latencies did not settle in the window; run a longer one",)
    unclear = [r for r in results if r.verdict == "inconclusive"]
    if unclear:
        return "inconclusive", tuple(_inconclusive(r, counted.length_s) for r in unclear)
    return "met", ()


def _inconclusive(result: SloResult, window_s: float) -> str:
    """Return what a limit lacks: a number of requests, and the minutes that they take."""
    text = result.attained_text
    if result.num_needed is None:
        return f"{text}; this is exactly the limit, so no longer run decides"
    least = samples_needed(LEVELS[result.percentile])
    if result.num_requests < least:
        text += f"; a {result.percentile} takes at least {least} requests"
    more = max(1, result.num_needed - result.num_requests)
    minutes = window_s / 60 * more / max(1, result.num_requests)
    if minutes > MAX_EXTENSION_MINUTES:
        return f"{text}; this is so close to the limit that another day would not decide"
    longer = f"{minutes:.1f} minutes" if minutes >= 1 else f"{math.ceil(60 * minutes)} s"
    return f"{text}; needs about {longer} more ({more} requests)"


def _miss(result: SloResult) -> str:
    missed = f"{result.num_missed} of {result.num} missed it"
    limit = f"the SLO limit of {1000 * result.limit_s:g} ms ({missed})"
    if result.measured_s is None:
        return f"{result.name} has no value, because too many requests have no answer; {limit}"
    return f"{result.name} is {1000 * result.measured_s:.1f} ms, more than {limit}"


def _invalid(
    run: Run, window: MeasurementWindow, measured: Sequence[Sample], health: Health
) -> list[str]:
    problems = [f"the load client was not fit: {problem}" for problem in health.problems]
    not_sent = len(window.requests) - len(measured)
    if not_sent > MAX_NOT_SENT_FRACTION * len(window.requests):
        problems.append(f"{not_sent} of {len(window.requests)} scheduled requests were never sent")
    if not run.job.plain:  # whose answers end when the model ends them
        problems += wrong_lengths(measured)
    cached_fraction = window.counted.cached_fraction
    if cached_fraction is not None and cached_fraction > MAX_CACHED_FRACTION:
        problems.append(
            f"{cached_fraction:.0%} of the prompt tokens came from the prefix cache, "
            "which the workload does not ask for"
        )
    return problems
