"""The fewest GPUs that hold the SLO, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from sizing.search.candidate import Candidate, smallest
from sizing.search.layout import Layout, legal_degrees, memory_rule, pairing_rule
from sizing.search.slo import meets, tightest
from sizing.search.step_models import StepModels
from sizing.traffic import decode, prefill
from sizing.traffic.forecast import forecast
from sizing.traffic.spread import constant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sizing.plan import Inputs
    from sizing.specs.slo import SloSpec
    from sizing.traffic.forecast import Forecast

MOST_REPLICAS = 1 << 14
"""Beyond this many replicas of a pool the search gives up: a bound counted in work, not time."""

SPARE = 16
"""Times as many replicas as the load needs: as good as no queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The configuration with the fewest GPUs, ties broken by TTFT."""

    candidate: Candidate
    forecast: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """
    No configuration holds the SLO within the budget.

    Attributes:
        reason: one sentence.
        binds: `capacity` (memory), `SLO floor`, `SLO` or `max_gpus`.
        nearest: configuration that comes nearest, as `sizing predict` takes it; `None` if the
            model fits nowhere.
        nearest_gpus: how many GPUs it takes.
        missed_by: what it misses, and by how much.
        way_out: what would help.
    """

    reason: str
    binds: str
    nearest: str | None
    nearest_gpus: int | None
    missed_by: str
    way_out: str


def search(inputs: Inputs) -> Found | Infeasible:
    """
    Find the fewest GPUs that hold the SLO at its percentile.

    Layouts are taken in the order of a lower bound on their GPUs (every pool just below the
    allowed utilisation); the search ends at the first whose bound is no better than what it has.
    For each, the decode pool is the smallest that holds the SLO behind an uncontended prefill
    pool, then grows while that saves more prefill GPUs than it costs (docs/model.md, eq. P2).

    Raises:
        InputError: the scenario cannot be planned at all.
    """
    models = StepModels(inputs)
    degrees = legal_degrees(inputs)
    layouts = [Layout(prefill_tp=p, decode_tp=d) for p, d in product(degrees, degrees)]
    paired = [layout for layout in layouts if pairing_rule(inputs.model, layout) is None]
    unfit = {tp: memory_rule(inputs, tp) for tp in degrees}
    starts = [
        smallest(inputs, layout, models)
        for layout in paired
        if unfit[layout.prefill_tp] is None and unfit[layout.decode_tp] is None
    ]
    starts = [start for start in starts if start.slots]
    if not starts:
        return _fits_nowhere(inputs, [rule for rule in unfit.values() if rule])
    best: Found | None = None
    for start in sorted(_limited(starts, inputs), key=lambda s: (_bound(s, inputs), s.layout)):
        if best and _bound(start, inputs) > best.candidate.gpus:
            break
        found = _fewest(start, inputs, best)
        if found and (best is None or _rank(found, inputs.scenario.slo) < _rank(best, inputs.scenario.slo)):
            best = found
    if best is None:
        return _nothing_holds(starts, inputs)
    if best.candidate.gpus > inputs.cluster.max_gpus:
        return _over_budget(best, inputs)
    return best


def _rank(found: Found, slo: SloSpec) -> tuple[int, float]:
    """Fewer GPUs first, then lower TTFT."""
    level = float(slo.percentile.removeprefix("p")) / 100
    return found.candidate.gpus, found.forecast.ttft.quantile(level)


def _limited(starts: list[Candidate], inputs: Inputs) -> Iterator[Candidate]:
    """
    Yield each layout with the decode batch limits worth trying.

    The largest whose full batches keep the TPOT, or what memory allows; then halves, which
    interference may ask for.
    """
    for start in starts:
        limit = largest_batch(start, inputs.scenario.slo)
        while limit >= 1:
            yield start.limited(limit)
            limit //= 2


def largest_batch(start: Candidate, slo: SloSpec) -> int:
    """Largest batch limit at which requests that always share a full batch keep TPOT and ITL."""
    level = float(slo.percentile.removeprefix("p")) / 100
    longest = float(start.tandem.output_tokens.max())
    share = decode.averaged_share(start.tandem, longest)

    def holds(batch: int) -> bool:
        full = constant(float(batch))
        pace = decode.step_spread(start.tandem, full, averaged=share).quantile(level)
        gap = decode.step_spread(start.tandem, full, averaged=1.0).quantile(level)
        return (slo.tpot_s is None or pace <= slo.tpot_s) and (slo.itl_s is None or gap <= slo.itl_s)

    if holds(start.slots):
        return start.slots
    low, high = 0, start.slots
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _bound(start: Candidate, inputs: Inputs) -> int:
    """Fewest GPUs at which no pool exceeds the allowed utilisation."""
    replicas = _lowest(start, inputs)
    return replicas[0] * start.layout.prefill_tp + replicas[1] * start.layout.decode_tp


def _lowest(start: Candidate, inputs: Inputs) -> tuple[int, int]:
    """Fewest replicas of each pool by utilisation alone, interference left out."""
    ceiling = inputs.scenario.search.max_utilisation_fraction
    one = start.sized(1, 1).tandem
    return (
        max(1, int(np.ceil(prefill.utilisation(one) / ceiling - 1e-9))),
        max(1, int(np.ceil(decode.utilisation(one) / ceiling - 1e-9))),
    )


def _fewest(start: Candidate, inputs: Inputs, best: Found | None) -> Found | None:
    """Find the fewest GPUs of one layout and limit; stop where *best* cannot be beaten."""
    slo = inputs.scenario.slo
    low_prefill, low_decode = _lowest(start, inputs)
    many = SPARE * low_prefill

    def holds(prefill_replicas: int, decode_replicas: int) -> bool:
        return meets(forecast(start.sized(prefill_replicas, decode_replicas).tandem), slo)

    replicas = least(lambda count: holds(many, count), low_decode)
    if replicas is None:
        return None
    # With decode as good as free, fewer prefill replicas than this cannot do.
    floor = least(lambda count: holds(count, SPARE * replicas), low_prefill)
    found: Found | None = None
    while floor is not None:
        cheapest = floor * start.layout.prefill_tp + replicas * start.layout.decode_tp
        if any(each and cheapest > each.candidate.gpus for each in (best, found)):
            break
        count = least(lambda count: holds(count, replicas), floor)
        if count is not None:
            sized = start.sized(count, replicas)
            predicted = forecast(sized.tandem)
            if predicted and (found is None or sized.gpus < found.candidate.gpus):
                found = Found(candidate=sized, forecast=predicted)
            if count == floor:
                break
        replicas += 1
    return found


def least(holds: Callable[[int], bool], start: int) -> int | None:
    """Return the smallest count from *start* on that *holds*, which more never break."""
    if holds(start):
        return start
    low, step = start, 1
    while not holds(low + step):
        low += step
        step *= 2
        if low + step > MOST_REPLICAS:
            return None
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _fits_nowhere(inputs: Inputs, rules: list[str]) -> Infeasible:
    """No degree leaves room for the KV cache."""
    return Infeasible(
        reason=f"{inputs.model.id} fits on no allowed layout of {inputs.gpu.name}: {rules[-1]}",
        binds="capacity",
        nearest=None,
        nearest_gpus=None,
        missed_by=rules[-1],
        way_out="a GPU with more memory, quantised weights (model.weight_dtype), a shorter context,"
        " or a larger HB domain",
    )


def _nothing_holds(starts: list[Candidate], inputs: Inputs) -> Infeasible:
    """No number of GPUs holds the SLO: the layout that comes nearest, alone and unhurried."""
    slo = inputs.scenario.slo
    reached = []
    for start in starts:
        low = _lowest(start, inputs)
        for limit in {1, max(1, largest_batch(start, slo))}:
            sized = start.limited(limit).sized(SPARE * low[0], SPARE * _lowest(start.limited(limit), inputs)[1])
            predicted = forecast(sized.tandem)
            if predicted:
                reached.append((tightest(predicted, slo), sized))
    check, sized = min(reached, key=lambda pair: (pair[0].ratio, pair[1].gpus, pair[1].layout))
    return Infeasible(
        reason=f"no number of GPUs holds the SLO: {check.name} is at least"
        f" {_ms(check.seconds)} on {inputs.gpu.name}, with hardly any queue",
        binds="SLO floor",
        nearest=str(sized),
        nearest_gpus=sized.gpus,
        missed_by=f"{check.name} {_ms(check.seconds)}, limit {_ms(check.limit_s)}"
        f" ({check.ratio:.2f} times)",
        way_out=f"a limit above {_ms(check.seconds)}, a faster GPU, a smaller model or fewer bytes"
        " (weight_dtype fp8), shorter prompts",
    )


def _over_budget(best: Found, inputs: Inputs) -> Infeasible:
    """The SLO can be held, with more GPUs than there are."""
    needed, budget = best.candidate.gpus, inputs.cluster.max_gpus
    return Infeasible(
        reason=f"the SLO needs {needed} {inputs.gpu.name}, cluster.max_gpus is {budget}",
        binds="max_gpus",
        nearest=str(best.candidate),
        nearest_gpus=needed,
        missed_by=f"{needed - budget} GPUs",
        way_out=f"cluster.max_gpus = {needed}, a looser SLO, or a lower rate",
    )


def _ms(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{seconds * 1e3:.1f} ms"
