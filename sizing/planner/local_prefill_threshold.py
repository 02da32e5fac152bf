"""The local prefill threshold: prompts up to it are computed by their decode replica."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidates import fewest_by_utilisation, one_replica_each
from sizing.planner.configuration import cost
from sizing.planner.pool_sizing import PoolSizing, size_split_pools
from sizing.planner.simulated_check import SEEDS, VERIFY_REQUESTS, Simulations, verified

if TYPE_CHECKING:
    from sizing.planner.configuration import Configuration
    from sizing.planner.error_model import StepErrors
    from sizing.planner.result import Found

PROMPT_SHARES = (0.9, 0.75, 0.5)
"""Shares of the prompts that the thresholds tried keep from the prefill pool."""

MAX_RATIO = 0.95
"""Largest ratio of the limits' use to that without a threshold, where it saves no GPU."""


def choose_local_threshold(simulations: Simulations, plain: Found) -> Found:
    """
    Return the split configuration *plain* with a threshold where that is better, else as it is.

    Better: it holds the SLO as surely at less cost; or at the same, with TTFT at its percentile and
    the limit that is used up most both below 0.95 times the other's, simulated (docs/model.md,
    eq. L7). Layout and batch limit stay. No threshold is tried where all prompts are alike, where
    the scenario sets one, on a calibrated machine, where no prompt was timed in a decode replica,
    or with a library for experts, whose kernels in decode pools have room for few tokens.
    """
    inputs, chosen = simulations.inputs, plain.configuration
    given = inputs.scenario.search.local_threshold_tokens is not None
    untimed = inputs.calibration is not None or inputs.engine.all_to_all is not None
    if given or untimed or chosen.layout.prefill is None:
        return plain
    prompts = plain.models.load(chosen).all_tokens
    thresholds = [int(np.quantile(prompts, share, method="lower")) for share in PROMPT_SHARES]
    variants = [
        one_replica_each(simulations.models, chosen.layout, tokens)
        .limited(chosen.batch_limit)
        .sized(chosen.replicas)
        for tokens in dict.fromkeys(thresholds)
        if tokens < prompts.max()
    ]
    best = plain
    for each in variants:
        best = _cheaper(each, best, plain, simulations) or best
    if best is not plain:
        return best
    faster = (_faster(each, plain, simulations) for each in variants)
    return min(faster, key=lambda pair: pair[0], default=(1.0, plain))[1]


def _cheaper(
    variant: Configuration, best: Found, plain: Found, simulations: Simulations
) -> Found | None:
    """Size the pools with a threshold; `None` unless they cost less than *best*."""
    errors, below = plain.errors, cost(simulations.inputs, best.configuration)
    lowest = fewest_by_utilisation(simulations.models, variant, errors)
    sizing = PoolSizing(
        simulations=simulations,
        errors=errors,
        quick=False,
        lowest=lowest,
        below=below,
        max_gpus=best.configuration.gpus,
    )
    least, sizes = lowest.replicas, variant.replicas
    guess = variant.sized(
        {
            "prefill": max(least["prefill"], sizes["prefill"] - 1),
            "decode": max(least["decode"], sizes["decode"]),
        }
    )
    sized = size_split_pools(sizing, guess)
    found = None if sized is None else verified(simulations, sized, errors, below)
    return None if found is None else replace(best, configuration=found[0], verdicts=found[1])


def _faster(variant: Configuration, plain: Found, simulations: Simulations) -> tuple[float, Found]:
    """Return the ratio of TTFT with the threshold, and the result; 1 and *plain* if no better."""
    errors = plain.errors
    verdicts = tuple(simulations.holds(variant, errors, seed=seed) for seed in SEEDS)
    if not all(each.holds for each in verdicts):
        return 1.0, plain
    used = [_used(simulations, each, errors) for each in (variant, plain.configuration)]
    ratios = [after / before for after, before in zip(*used, strict=True)]
    if max(ratios) >= MAX_RATIO:
        return 1.0, plain
    return ratios[0], replace(plain, configuration=variant, verdicts=verdicts)


def _used(
    simulations: Simulations, chosen: Configuration, errors: StepErrors
) -> tuple[float, float]:
    """Return the used shares of the TTFT limit and of the tightest one, under the last seed."""
    run = simulations.run(chosen, errors, requests=VERIFY_REQUESTS, seed=SEEDS[-1])
    if run is None:
        return 1.0, 1.0
    ttft = max(check.ratio for check, _ in run.limits if check.metric == "ttft")
    return ttft, run.tightest.ratio
