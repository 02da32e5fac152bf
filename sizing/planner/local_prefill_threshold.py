"""The local prefill threshold: prompts up to it are computed by their decode replica."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidates import (
    Candidate,
    cost,
    fewest_by_utilisation,
    one_replica_each,
    with_search,
)
from sizing.planner.pool_sizing import PoolSizing, size_split_pools
from sizing.planner.simulated_check import (
    SEEDS,
    VERIFY_REQUESTS,
    Simulations,
    SloSimulator,
    verify_sizes,
)
from sizing.planner.step_models import StepModels

if TYPE_CHECKING:
    from minicluster.plan import Inputs
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
    inputs = simulations.inputs
    given = inputs.scenario.search.local_threshold_tokens is not None
    untimed = inputs.calibration is not None or inputs.engine.all_to_all is not None
    if given or untimed or plain.candidate.layout.prefill is None:
        return plain
    prompts = plain.candidate.tandem.all_tokens
    thresholds = [int(np.quantile(prompts, share, method="lower")) for share in PROMPT_SHARES]
    variants = [
        with_search(inputs, local_threshold_tokens=tokens)
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


def _cheaper(inputs: Inputs, best: Found, plain: Found, simulations: Simulations) -> Found | None:
    """Size the pools with a threshold; `None` unless they cost less than *best*."""
    smallest = _one_replica_each(inputs, plain)
    simulator = SloSimulator(simulations, plain.errors)
    lowest = fewest_by_utilisation(smallest.with_errors(plain.errors), inputs)
    below = cost(inputs, best.candidate)
    sizing = PoolSizing(
        inputs=inputs,
        simulator=simulator,
        candidate=smallest,
        lowest=lowest,
        below=below,
        max_gpus=best.candidate.gpus,
    )
    sizes = plain.candidate.sizes
    guess = max(lowest[0], sizes[0] - 1), max(lowest[1], sizes[1])
    found = size_split_pools(sizing, guess)
    verified = None if found is None else verify_sizes(inputs, simulator, found, below)
    if verified is None:
        return None
    return replace(best, candidate=verified[0], verdicts=verified[1])


def _faster(inputs: Inputs, plain: Found, simulations: Simulations) -> tuple[float, Found]:
    """Return the ratio of TTFT with the threshold, and the result; 1 and *plain* if no better."""
    chosen = _one_replica_each(inputs, plain).sized(*plain.candidate.sizes)
    simulator = SloSimulator(simulations, plain.errors)
    verdicts = tuple(simulator.verdict(chosen, seed=seed) for seed in SEEDS)
    if not all(each.holds for each in verdicts):
        return 1.0, plain
    used = [
        _used(simulations, each.with_errors(plain.errors)) for each in (chosen, plain.candidate)
    ]
    ratios = [after / before for after, before in zip(*used, strict=True)]
    if max(ratios) >= MAX_RATIO:
        return 1.0, plain
    return ratios[0], replace(plain, candidate=chosen, verdicts=verdicts)


def _one_replica_each(inputs: Inputs, plain: Found) -> Candidate:
    """Return one replica per pool of the plain layout and limit, with the threshold's steps."""
    smallest = one_replica_each(inputs, plain.candidate.layout, StepModels(inputs))
    return smallest.limited(plain.candidate.tandem.decode.max_batch_size)


def _used(simulations: Simulations, slow: Candidate) -> tuple[float, float]:
    """Return the used shares of the TTFT limit and of the tightest one, under the last seed."""
    run = simulations.run(slow, requests=VERIFY_REQUESTS, seed=SEEDS[-1])
    if run is None:
        return 1.0, 1.0
    ttft = max(check.ratio for check, _ in run.limits if check.metric == "ttft")
    return ttft, run.tightest.ratio
