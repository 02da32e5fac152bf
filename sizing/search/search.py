"""The fewest GPUs that hold the SLO, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from sizing.search.candidate import Candidate, smallest
from sizing.search.layout import Layout, legal_degrees, memory_rule, pairing_rule
from sizing.search.slo import Check, meets, tightest
from sizing.search.step_models import StepModels
from sizing.traffic import decode, prefill
from sizing.traffic.forecast import Forecast, at_rate, forecast
from sizing.traffic.spread import constant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sizing.plan import Inputs
    from sizing.specs.slo import SloSpec

MOST_REPLICAS = 1 << 14
"""Beyond this many replicas of a pool the search gives up: a bound counted in work, not time."""

IDLE_REQUESTS_PER_S = 1e-6
"""A load under which nobody meets anybody."""

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
    pool, then grows while that saves more prefill GPUs than it costs (docs/model.md, eq. L2).

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
    alone = [(_idle_check(start, inputs.scenario.slo), start) for start in starts]
    starts = [start for check, start in alone if check.ratio <= 1]
    if not starts:
        return _below_floor(alone, inputs)
    best: Found | None = None
    for start in sorted(_limited(starts, inputs), key=lambda s: (_bound(s, inputs), s.layout)):
        if best and _bound(start, inputs) > best.candidate.gpus:
            break
        found = _fewest(start, inputs, best)
        if found and (best is None or _rank(found, inputs) < _rank(best, inputs)):
            best = found
    if best is None:
        return _too_many(alone, inputs)
    if best.candidate.gpus > inputs.cluster.max_gpus:
        return _over_budget(best, inputs)
    return best


def _rank(found: Found, inputs: Inputs) -> tuple[int, float, int]:
    """Fewer GPUs first, then lower TTFT to the millisecond, then more room in the decode batch."""
    level = float(inputs.scenario.slo.percentile.removeprefix("p")) / 100
    ttft_s = round(found.forecast.ttft.quantile(level), 3)
    return found.candidate.gpus, ttft_s, -found.candidate.tandem.decode.max_batch_size


def _idle_check(start: Candidate, slo: SloSpec) -> Check:
    """Return the tightest limit for a request that meets no other."""
    alone = forecast(at_rate(start.tandem, IDLE_REQUESTS_PER_S))
    if alone is None:  # a request a fortnight saturates nothing that answers within days
        return Check(name="TTFT", seconds=np.inf, limit_s=slo.ttft_s)
    return tightest(alone, slo)


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

    def holds(prefill_replicas: int, decode_replicas: int) -> bool:
        return meets(forecast(start.sized(prefill_replicas, decode_replicas).tandem), slo)

    def least_prefill(decode_replicas: int, at_least: int) -> int | None:
        return least(lambda count: holds(count, decode_replicas), at_least)

    replicas = least(lambda count: holds(SPARE * low_prefill, count), low_decode)
    # With decode as good as free, fewer prefill replicas than this cannot do.
    floor = None if replicas is None else least_prefill(SPARE * replicas, low_prefill)
    found: Found | None = None
    while replicas is not None and floor is not None:
        cheapest = start.sized(floor, replicas).gpus
        if any(each and cheapest > each.candidate.gpus for each in (best, found)):
            break
        count = least_prefill(replicas, floor)
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


def _below_floor(alone: list[tuple[Check, Candidate]], inputs: Inputs) -> Infeasible:
    """No number of GPUs holds the SLO: say what a single request takes on an idle system."""
    check, start = min(alone, key=lambda pair: (pair[0].ratio, pair[1].gpus, pair[1].layout))
    return Infeasible(
        reason=f"no number of {inputs.gpu.name} holds the SLO: {check.name} of requests that meet"
        f" no other is {_ms(check.seconds)} already",
        binds="SLO floor",
        nearest=str(start),
        nearest_gpus=start.gpus,
        missed_by=f"{check.name} {_ms(check.seconds)}, limit {_ms(check.limit_s)}"
        f" ({check.ratio:.2f} times)",
        way_out=f"a limit well above {_ms(check.seconds)}, a faster GPU, a smaller model or fewer"
        " bytes (model.weight_dtype), shorter prompts",
    )


def _too_many(alone: list[tuple[Check, Candidate]], inputs: Inputs) -> Infeasible:
    """A lone request holds the SLO, but no pool that the search looks at does under the load."""
    check, start = min(alone, key=lambda pair: (pair[0].ratio, pair[1].gpus, pair[1].layout))
    return Infeasible(
        reason=f"no pools of up to {MOST_REPLICAS} replicas hold the SLO under"
        f" {inputs.scenario.workload.requests_per_s:g} requests/s",
        binds="SLO",
        nearest=str(start),
        nearest_gpus=start.gpus,
        missed_by=f"nothing on an idle system ({check.name} {_ms(check.seconds)} of"
        f" {_ms(check.limit_s)}), too much under load",
        way_out="a looser SLO, or a lower workload.requests_per_s",
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
