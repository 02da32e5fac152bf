"""What a run proves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.spread import samples_needed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.client import Health
    from loadtest.promise import Promise
    from loadtest.run import Run
    from loadtest.samples import Sample

MAX_WRONG_LENGTHS = 0.01
"""Share of answers that may be of another length than asked."""


def decide(run: Run, promises: tuple[Promise, ...], own: Health) -> tuple[str, tuple[str, ...]]:
    """Return the verdict and why; what makes a run invalid comes before what it seems to say."""
    measured = run.measured
    answered = sum(s.ok for s in measured)
    if run.client.stop == "died":
        died_s = max((s.chunk_s[-1] for s in run.samples if s.chunk_s), default=0.0)
        return "failed", (f"{run.job.host} stopped answering {died_s:.1f} s into the run",)
    if run.client.stop != "complete":
        return "interrupted", (f"the run was {run.client.stop}; the samples so far are kept",)
    if not answered:
        seen = next((s.detail for s in measured if s.detail), "no answer")
        return "failed", (f"{run.job.host} answered no request: {seen}",)
    invalid = [f"the load client was not fit: {problem}" for problem in own.problems]
    invalid += _wrong_lengths(measured)
    if invalid:
        return "inconclusive", tuple(invalid)
    open_promises = [p for p in promises if not p.conclusive]
    if open_promises:
        percentile = open_promises[0].percentile
        needed, num = samples_needed(percentile), min(p.num for p in open_promises)
        few = f"{num} requests are too few for {percentile}: {needed} are needed"
        return "inconclusive", (f"{few}, {needed - num} more (--requests {needed})",)
    missed = [p for p in promises if not p.kept]
    return ("missed", tuple(map(_miss, missed))) if missed else ("met", ())


def _miss(promise: Promise) -> str:
    name = f"{promise.metric.upper()} {promise.percentile}"
    limit = f"the {1000 * promise.limit_s:g} ms promised"
    share = f"{promise.num_missed} of {promise.num} missed"
    if promise.measured_s is None:
        return f"{name} has no value, too many requests have no answer; {limit} ({share})"
    return f"{name} is {1000 * promise.measured_s:.1f} ms, more than {limit} ({share})"


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
