"""Conditional disaggregation: prompts so short that they are computed where they are decoded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidate import Candidate, smallest
from sizing.planner.closed_form import fewest_by_utilisation
from sizing.planner.objective import cost
from sizing.planner.settle import PoolSizing, settle_split
from sizing.planner.step_models import StepModels
from sizing.planner.trial import PROVING_REQUESTS, SEEDS, Trials, confirmed, limits_of

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.answer import Found
    from sizing.planner.trial import SimulationBudget

SHARES = (0.9, 0.75, 0.5)
"""Shares of the prompts that a threshold tried keeps from the prefill pool."""

SOONER = 0.95
"""Share of the tightest limit's use that makes a threshold worth it where it saves no GPU."""


def conditional(inputs: Inputs, plain: Found, work: SimulationBudget) -> Found:
    """
    Return the split configuration *plain* with a threshold where that is better, else as it is.

    Better: it holds the SLO as surely at less cost; or at the same, with TTFT at its percentile and
    the limit that is used up most both below 0.95 times the other's, simulated (docs/model.md,
    eq. L7). Of its layout and batch limit; nothing is tried where all prompts are alike, or where
    the scenario says what to do.
    """
    search = inputs.scenario.search
    if search.local_threshold_tokens is not None or plain.candidate.layout.prefill is None:
        return plain
    prompts = plain.candidate.tandem.all_tokens
    tried = [int(np.quantile(prompts, share, method="lower")) for share in SHARES]
    given = [
        replace(
            inputs,
            scenario=replace(
                inputs.scenario, search=replace(search, local_threshold_tokens=tokens)
            ),
        )
        for tokens in dict.fromkeys(tried)
        if tokens < prompts.max()
    ]
    best = plain
    for each in given:
        best = _cheaper(each, best, plain, work) or best
    if best is plain:
        best = min(
            (_sooner(each, plain, work) for each in given),
            key=lambda pair: pair[0],
            default=(1.0, plain),
        )[1]
    return best


def _cheaper(inputs: Inputs, best: Found, plain: Found, work: SimulationBudget) -> Found | None:
    """Settle sizes with a threshold; `None` unless they cost less than *best*."""
    start, trials = _start(inputs, plain), Trials(inputs, plain.errors, work=work)
    lowest = fewest_by_utilisation(start.off_by(plain.errors), inputs)
    below = cost(inputs, best.candidate)
    one = PoolSizing(
        inputs=inputs,
        trials=trials,
        start=start,
        lowest=lowest,
        below=below,
        most_gpus=best.candidate.gpus,
    )
    sizes = plain.candidate.sizes
    guess = max(lowest[0], sizes[0] - 1), max(lowest[1], sizes[1])
    settled = settle_split(one, guess)
    proof = None if settled is None else confirmed(inputs, trials, settled, below)
    if proof is None:
        return None
    return replace(best, candidate=proof[0], verdicts=proof[1], forecast=None)


def _sooner(inputs: Inputs, plain: Found, work: SimulationBudget) -> tuple[float, Found]:
    """Return what a threshold leaves of the TTFT and what does it: 1 and *plain* if too much."""
    chosen = _start(inputs, plain).sized(*plain.candidate.sizes)
    trials = Trials(inputs, plain.errors, work=work)
    verdicts = tuple(trials.verdict(chosen, seed=seed) for seed in SEEDS)
    if not all(each.holds for each in verdicts):
        return 1.0, plain
    now, before = (_used(inputs, trials, each) for each in (chosen, plain.candidate))
    if any(after >= SOONER * than for after, than in zip(now, before, strict=True)):
        return 1.0, plain
    return now[0] / before[0], replace(plain, candidate=chosen, verdicts=verdicts, forecast=None)


def _start(inputs: Inputs, plain: Found) -> Candidate:
    """Return one replica a pool of the plain layout and limit, with the threshold's steps."""
    start = smallest(inputs, plain.candidate.layout, StepModels(inputs))
    return start.limited(plain.candidate.tandem.decode.max_batch_size)


def _used(inputs: Inputs, trials: Trials, chosen: Candidate) -> tuple[float, float]:
    """Shares used of the TTFT's limit and of the tightest one, simulated with the fresh seed."""
    outcome = trials.outcome(
        chosen.off_by(trials.errors), requests=PROVING_REQUESTS, seed=SEEDS[-1]
    )
    checks = [check for check, _ in limits_of(outcome, inputs.scenario.slo)]
    return checks[0].ratio, max(check.ratio for check in checks)
