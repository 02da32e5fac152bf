"""What a run proves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from loadtest.run.client_health import SHORT
from minicluster.stats.confidence import samples_needed
from minicluster.stats.quantiles import LEVELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.run.client_health import Health
    from loadtest.run.folder import Run
    from loadtest.verdict.slo import SloResult
    from loadtest.verdict.window import MeasurementWindow, SteadyState
    from minicluster.workload.samples import Sample

MAX_WRONG_LENGTHS = 0.01
"""Share of answers that may be of another length than asked."""

MAX_NOT_SENT = 0.01
"""Share of the scheduled requests that the client may fail to send."""

MAX_CACHED = 0.05
"""Share of prompt tokens that may come from the prefix cache beyond those that are meant to."""

DAY_MINUTES = 24 * 60
"""A run that would have to be longer is none that anyone makes."""


def decide(
    run: Run, evidence: MeasurementWindow, promises: tuple[SloResult, ...], own: Health
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict and why; what makes a run invalid comes before what it seems to say."""
    measured = [s for s in evidence.requests if s is not None]
    if run.client.stop == "died":
        died_s = max((s.chunk_s[-1] for s in run.samples if s.chunk_s), default=0.0)
        return "failed", (f"{run.job.host} stopped answering {died_s:.1f} s into the run",)
    if run.client.stop == SHORT:
        why = "one of its processes ended, or was silent for 5 s; the samples so far are kept"
        return "invalid", (f"the load client was short of a worker: {why}",)
    if run.client.stop != "complete":
        return "interrupted", (f"the run was {run.client.stop}; the samples so far are kept",)
    if not any(s.ok for s in measured):
        seen = next((s.detail for s in measured if s.detail), "no answer")
        return "failed", (f"{run.job.host} answered no request: {seen}",)
    if invalid := _invalid(evidence, measured, own):
        return "invalid", tuple(invalid)
    return judged(evidence.settling, evidence.length_s, promises)


def judged(
    settling: SteadyState, window_s: float, promises: tuple[SloResult, ...]
) -> tuple[str, tuple[str, ...]]:
    """
    Return what a valid run proves, and why.

    Args:
        settling: where and whether it settled.
        window_s: length of what counts.
        promises: every limit of the SLO.
    """
    missed = [p for p in promises if p.verdict == "missed"]
    if missed:
        return "missed", tuple(map(_miss, missed))
    if settling.rising and any(p.attained_fraction < LEVELS[p.percentile] for p in promises):
        return "missed", ("latencies rise without end: more arrives than is answered",)
    if not settling.settled:
        return "inconclusive", ("latencies had not settled in the window; a longer one is needed",)
    unclear = [p for p in promises if p.verdict == "open"]
    if unclear:
        return "inconclusive", tuple(_open(p, window_s) for p in unclear)
    return "met", ()


def _open(promise: SloResult, window_s: float) -> str:
    """Say what a limit lacks: requests, and so minutes."""
    name = f"{promise.metric.upper()} {promise.percentile}"
    kind = " gaps" if promise.metric == "itl" else ""
    seen = (
        f"{promise.attained_fraction:.2%} of {promise.num}{kind} within "
        f"{1000 * promise.limit_s:g} ms (95 % interval {promise.attained_low:.2%} to "
        f"{promise.attained_high:.2%}; {promise.design_effect:.1f} weigh as one independent)"
    )
    if promise.num_needed is None:
        return f"{name}: {seen}; exactly on the limit: no length of run tells"
    fewest = samples_needed(LEVELS[promise.percentile])
    if promise.num_requests < fewest:
        seen += f"; fewer than {fewest} requests prove no {promise.percentile}"
    more = max(1, promise.num_needed - promise.num_requests)
    minutes = window_s / 60 * more / max(1, promise.num_requests)
    if minutes > DAY_MINUTES:
        return f"{name}: {seen}; so close to the limit that a day more would not tell"
    longer = f"{minutes:.1f} minutes" if minutes >= 1 else f"{math.ceil(60 * minutes)} s"
    return f"{name}: {seen}; needs about {longer} more ({more} requests)"


def _miss(promise: SloResult) -> str:
    name = f"{promise.metric.upper()} {promise.percentile}"
    limit = f"the {1000 * promise.limit_s:g} ms promised"
    share = f"{promise.num_missed} of {promise.num} missed"
    if promise.measured_s is None:
        return f"{name} has no value, too many requests have no answer; {limit} ({share})"
    return f"{name} is {1000 * promise.measured_s:.1f} ms, more than {limit} ({share})"


def _invalid(evidence: MeasurementWindow, measured: Sequence[Sample], own: Health) -> list[str]:
    """Say what keeps the run from proving anything, whatever it seems to show."""
    problems = [f"the load client was not fit: {problem}" for problem in own.problems]
    not_sent = len(evidence.requests) - len(measured)
    if not_sent > MAX_NOT_SENT * len(evidence.requests):
        problems.append(
            f"{not_sent} of {len(evidence.requests)} scheduled requests were never sent"
        )
    problems += _wrong_lengths(measured)
    if evidence.cached_fraction is not None and evidence.cached_fraction > MAX_CACHED:
        problems.append(
            f"{evidence.cached_fraction:.0%} of the prompt tokens came from the prefix cache, "
            "which the workload does not ask for"
        )
    return problems


def _wrong_lengths(measured: Sequence[Sample]) -> list[str]:
    """Say so if the server did not compute what it was asked to."""
    answered = [s for s in measured if s.ok]
    problems = []
    for side in ("input", "output"):
        lengths = [
            (getattr(s, f"{side}_tokens"), getattr(s, f"asked_{side}_tokens")) for s in answered
        ]
        wrong = [(got, asked) for got, asked in lengths if got != asked]
        if len(wrong) > MAX_WRONG_LENGTHS * len(answered):
            got, asked = wrong[0]
            problems.append(
                f"{len(wrong)} of {len(answered)} answers have another {side} length than asked "
                f"(first: {got} tokens, not {asked}); does the endpoint honour `ignore_eos`?"
            )
    return problems
