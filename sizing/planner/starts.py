"""Where a search starts: layouts that the rules, memory and the SLO of an idle system allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidate import Candidate, smallest
from sizing.planner.layout import Layout, legal_shapes, memory_rule, pairing_rule, profile_rule
from sizing.planner.slo import Check, checks, under_load
from sizing.queueing import decode
from sizing.queueing.forecast import at_rate, forecast
from sizing.queueing.spread import constant

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from minicluster.specs.slo import SloSpec
    from sizing.planner.evidence import StepErrors
    from sizing.planner.step_models import StepModels

IDLE_REQUESTS_PER_S = 1e-6
"""A load under which nobody meets anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """
    One replica a pool of every layout.

    Attributes:
        split: layouts of two pools that may hold the SLO.
        mixed: layouts of one.
        alone: every split layout that fits memory, with the tightest limit of a lone request.
        unfit: why shapes were dropped.
    """

    split: tuple[Candidate, ...]
    mixed: tuple[Candidate, ...]
    alone: tuple[tuple[Check, Candidate], ...]
    unfit: tuple[str, ...]


def starting_points(inputs: Inputs, models: StepModels, errors: StepErrors) -> Starts:
    """
    List what may be searched; a layout that a lone request finds too slow is dropped.

    Raises:
        InputError: a degree that the scenario asks for cannot be had.
    """
    rules = {shape: memory_rule(inputs, shape) for shape in legal_shapes(inputs)}
    fit = [shape for shape, rule in rules.items() if rule is None]
    layouts = [Layout(prefill=p, decode=d) for p, d in product(fit, fit)]
    layouts = [each for each in layouts if pairing_rule(inputs.model, each) is None]
    deployable = inputs.scenario.search.layouts == "deployable"
    if deployable:
        layouts = [each for each in layouts if profile_rule(inputs, each) is None]
    starts = [smallest(inputs, layout, models) for layout in layouts]
    alone = _alone([start for start in starts if start.slots], inputs, errors)
    mixed: list[Candidate] = []
    if inputs.calibration is None and inputs.gpu.kind != "cpu":
        both = [smallest(inputs, Layout(prefill=None, decode=shape), models) for shape in fit]
        idle = _alone([start for start in both if start.slots], inputs, errors)
        mixed = [start for check, start in idle if check.ratio <= 1]
    return Starts(
        split=tuple(start for check, start in alone if check.ratio <= 1),
        mixed=tuple(mixed),
        alone=tuple(alone),
        unfit=tuple(rule for rule in rules.values() if rule is not None),
    )


def _alone(
    starts: list[Candidate], inputs: Inputs, errors: StepErrors
) -> list[tuple[Check, Candidate]]:
    """
    Pair each with the tightest limit for a request that meets no other.

    A mixed replica is taken as a pair of itself: a prompt that meets nobody costs the same in
    either, but for the pull, which is left out.
    """
    slo = inputs.scenario.slo
    found = []
    for start in starts:
        slow = _idle_checks(start.off_by(errors), slo)
        late = under_load(_idle_checks(start, slo), errors)
        found.append((max((*slow, late), key=lambda check: check.ratio), start))
    return found


def _idle_checks(start: Candidate, slo: SloSpec) -> tuple[Check, ...]:
    """Compare a request that meets no other with every limit."""
    tandem = at_rate(start.tandem, IDLE_REQUESTS_PER_S)
    if start.layout.prefill is None:
        path = replace(tandem.step_model.path, transfer_base_s=0.0, transfer_per_token_s=0.0)
        tandem = replace(tandem, step_model=replace(tandem.step_model, path=path))
    alone = forecast(tandem)
    if alone is None:  # a request a fortnight saturates nothing that answers within days
        return (Check(name="TTFT", seconds=np.inf, limit_s=slo.ttft_s),)
    return checks(alone, slo)


def largest_batch(start: Candidate, slo: SloSpec) -> int:
    """Largest batch limit at which requests that always share a full batch keep TPOT and ITL."""
    share_below = slo.level
    longest = float(start.tandem.output_tokens.max())
    share = decode.averaged_share(start.tandem, longest)

    def holds(batch: int) -> bool:
        full = constant(float(batch))
        pace = decode.step_spread(start.tandem, full, averaged=share).quantile(share_below)
        gap = decode.step_spread(start.tandem, full, averaged=1.0).quantile(share_below)
        return (slo.tpot_s is None or pace <= slo.tpot_s) and (
            slo.itl_s is None or gap <= slo.itl_s
        )

    if holds(start.slots):
        return start.slots
    low, high = 0, start.slots
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
