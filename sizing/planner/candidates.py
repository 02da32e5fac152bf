"""The layouts from which a search starts, and what no queue changes of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from sizing.planner import bounds
from sizing.planner.configuration import Configuration, cost
from sizing.planner.error_model import Check
from sizing.planner.layout import (
    Layout,
    legal_shapes,
    memory_rule,
    pairing_rule,
    profile_rule,
)
from sizing.planner.step_models import utilisations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.specs.slo import SloSpec
    from sizing.planner.bounds import OfferedLoad
    from sizing.planner.error_model import Promises, StepErrors
    from sizing.planner.step_models import StepModels


MAX_BATCH_SLOWDOWN = 1.5
"""Largest ratio of a prefill step's duration at the planned batch to that of a single prompt."""


def one_replica_each(
    models: StepModels, layout: Layout, local_threshold_tokens: int | None = None
) -> Configuration:
    """
    Return one replica a pool, with the largest decode batch that memory and engine allow.

    Args:
        local_threshold_tokens: of split pools; `None`: the scenario's, or none.
    """
    inputs, ones = models.inputs, dict.fromkeys(layout.shapes, 1)
    local = local_threshold_tokens or inputs.scenario.search.local_threshold_tokens or 0
    one = Configuration(
        layout=layout,
        replicas=ones,
        max_batch=ones,
        local_threshold_tokens=0 if layout.prefill is None else local,
    )
    # Of a measured machine batches of prompts were not timed.
    if layout.prefill is not None and inputs.calibration is None:
        one = replace(one, max_batch={**ones, "prefill": prefill_batch(models.load(one))})
    return one.limited(max(1, most_sequences(models, one)))


def most_sequences(models: StepModels, chosen: Configuration) -> int:
    """Return the sequences that one batch of the pool that decodes has KV cache for (eq. M5)."""
    mean, deviation = models.load(chosen.limited(1)).context
    return models.max_decode_batch(chosen.layout.decode, context=mean, deviation=deviation)


def prefill_batch(load: OfferedLoad) -> int:
    """
    Prompts that a prefill step should hold.

        largest k with t(k) <= 1.5 t(1) and k E[n] <= budget      (docs/model.md, eq. L1)

    A prompt that saturates compute by itself gains nothing from a batch, and waits for it.
    """
    most = int(load.prefill.max_batched_tokens // load.computed_tokens.mean())
    longest_s = MAX_BATCH_SLOWDOWN * bounds.prefill_batch_s(load, 1)
    batch = 1
    while batch < most and bounds.prefill_batch_s(load, batch + 1) <= longest_s:
        batch += 1
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """
    The layouts that `search.pools` allows, each with one replica per pool.

    Attributes:
        split: layouts of two pools whose unloaded latencies hold the SLO.
        mixed: layouts of one pool whose unloaded latencies hold the SLO.
        unloaded: every layout that fits memory, with its tightest limit at no load.
        unfit: the memory rule that each dropped shape breaks.
    """

    split: tuple[Configuration, ...]
    mixed: tuple[Configuration, ...]
    unloaded: tuple[tuple[Check, Configuration], ...]
    unfit: tuple[str, ...]


def list_candidates(models: StepModels, errors: StepErrors) -> Candidates:
    """
    List the layouts that rules, memory and the unloaded latencies allow.

    Raises:
        InputError: a degree that the scenario asks for cannot be had, or one pool of a machine that
            was calibrated: its steps that hold prompts and decoded tokens were not timed.
    """
    inputs = models.inputs
    wanted, timed = inputs.scenario.search.pools, inputs.calibration is not None
    apart = inputs.engine.all_to_all is not None
    if wanted == "mixed" and timed:
        expected = '"split" or "any": a calibration times the steps of split pools'
        raise InputError("search.pools", wanted, expected)
    rules = {shape: memory_rule(inputs, shape) for shape in legal_shapes(inputs)}
    fit = [shape for shape, rule in rules.items() if rule is None]
    layouts = [Layout(prefill=p, decode=d) for p, d in product(fit, fit)]
    layouts = [each for each in layouts if pairing_rule(inputs.model, each) is None]
    if inputs.scenario.search.layouts == "deployable":
        layouts = [each for each in layouts if profile_rule(inputs, each) is None]
    one_pool = [Layout(prefill=None, decode=shape) for shape in fit]
    split, mixed = (
        _unloaded(models, [one_replica_each(models, each) for each in asked], errors)
        for asked in (
            [] if wanted == "mixed" else layouts,
            [] if wanted == "split" or timed or apart else one_pool,
        )
    )
    return Candidates(
        split=tuple(candidate for check, candidate in split if check.ratio <= 1),
        mixed=tuple(candidate for check, candidate in mixed if check.ratio <= 1),
        unloaded=(*split, *mixed),
        unfit=tuple(rule for rule in rules.values() if rule is not None),
    )


def _unloaded(
    models: StepModels, candidates: list[Configuration], errors: StepErrors
) -> list[tuple[Check, Configuration]]:
    """Pair each candidate that has room for a sequence with its tightest limit at no load."""
    return [
        (max(unloaded_checks(models, each, errors), key=lambda check: check.ratio), each)
        for each in candidates
        if most_sequences(models, each)
    ]


def unloaded_checks(
    models: StepModels, chosen: Configuration, errors: StepErrors
) -> tuple[Check, ...]:
    """
    Compare the latencies of a request that is alone in the system with every limit of its class.

    Each limit has to hold with slow steps, and with latencies as far off as those measured.
    """
    one, slos = chosen.limited(1), models.inputs.scenario.promises
    slow = _checks(models.load(one, errors), slos)
    late = [check.with_errors(errors) for check in _checks(models.load(one), slos)]
    return tuple(max(pair, key=lambda check: check.ratio) for pair in zip(slow, late, strict=True))


def _checks(load: OfferedLoad, slos: Promises) -> list[Check]:
    checks = (
        _unloaded_checks(each, *own) for each, own in zip(load.by_class, slos.items(), strict=True)
    )
    return list(chain.from_iterable(checks))


@lru_cache(maxsize=1024)
def _unloaded_checks(load: OfferedLoad, of: str, slo: SloSpec) -> tuple[Check, ...]:
    found = bounds.unloaded_s(load)
    if slo.e2e_s is not None:  # every prompt with its answer, or with every answer
        answers_s = (load.output_tokens - 1) * found["tpot"]
        together = np.add if load.paired else np.add.outer
        found["e2e"] = together(found["ttft"], answers_s).ravel()
    return tuple(
        Check(
            metric=name,
            percentile=slo.percentile,
            of=of,
            seconds=float(np.quantile(found[name], slo.level, method="lower")),
            limit_s=limit_s,
        )
        for name, limit_s in slo.limits_s.items()
    )


def batch_limits(
    models: StepModels, chosen: Configuration, errors: StepErrors
) -> Iterator[Configuration]:
    """
    Yield the decode batch limits that are worth sizing, each with the fewest replicas that may do.

    The first is the largest whose full batches keep TPOT and fit memory; each next one is half of
    it, which interference between the pools may ask for; without that, none that costs twice as
    much as the largest. On a calibrated machine the largest batch that was measured comes before
    them: with it a plan can keep the engines that were measured.
    """
    first, inputs = np.inf, models.inputs
    limit, most = largest_batch(models, chosen, errors), most_sequences(models, chosen)
    limits = [limit >> halvings for halvings in range(limit.bit_length())]
    if inputs.calibration is not None and 0 < limit < most:
        limits.insert(0, most)
    for limit in limits:
        lowest = fewest_by_utilisation(models, chosen.limited(limit), errors)
        bound = cost(inputs, lowest)
        if inputs.calibration is None and bound > 2 * first:
            return
        first = min(first, bound)
        yield lowest


def largest_batch(models: StepModels, chosen: Configuration, errors: StepErrors) -> int:
    """Return the largest batch limit at which full batches of mean context keep every limit."""
    load = models.load(chosen, errors)
    limit_s = step_limit_s(load, models.inputs.scenario.promises)
    batches = range(1, most_sequences(models, chosen) + 1)
    return bisect_right(batches, limit_s, key=lambda batch: bounds.decode_step_s(load, batch))


def step_limit_s(load: OfferedLoad, slos: Promises) -> float:
    """
    Return the longest decode step that TPOT, ITL and E2E of every class allow.

    Of E2E it is what is left for each token of an answer at the percentile, after no time for TTFT.
    """
    found = [np.inf]
    for each, slo in zip(load.by_class, slos.values(), strict=True):
        if slo.tpot_s is not None:
            found.append(slo.tpot_s * load.tokens_per_step)
        if slo.itl_s is not None:
            found.append(slo.itl_s)
        if slo.e2e_s is not None:
            tokens = float(np.quantile(each.output_tokens, slo.level, method="lower"))
            found.append(slo.e2e_s / tokens * load.tokens_per_step)
    return min(found)


def fewest_by_utilisation(
    models: StepModels, chosen: Configuration, errors: StepErrors
) -> Configuration:
    """Return the same with the fewest replicas that the allowed utilisation takes."""
    ceiling = models.inputs.scenario.search.max_utilisation_fraction
    used = utilisations(models, chosen.smallest, errors)
    return chosen.sized(
        {role: max(1, int(np.ceil(each / ceiling - 1e-9))) for role, each in used.items()}
    )
