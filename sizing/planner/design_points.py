"""Design points: every layout at several sizes, each with its cost and latencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidates import Candidate, largest_batch, list_candidates
from sizing.planner.error_model import StepErrors
from sizing.planner.layout import profile_rule
from sizing.planner.slo import meets
from sizing.planner.step_models import StepModels
from sizing.queueing import decode, prefill
from sizing.queueing.forecast import forecast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from minicluster.plan import Inputs

UTILISATIONS = (0.95, 0.9, 0.8, 0.65, 0.5, 0.3)
"""Utilisations at which pools are sized: from few GPUs with long queues to many without."""

BATCH_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the largest decode batch: they trade tokens/s per GPU for tokens/s per user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignPoint:
    """
    One configuration under the scenario's load, by closed forms.

    Attributes:
        label: as `sizing predict` takes it.
        deployable: whether the engine profile allows it.
        power_w: of its GPUs; `None` where a GPU's power is unknown.
        price_usd_per_hour: `None` where the scenario gives no price.
        ttft_s: at the SLO's percentile.
        tpot_s: likewise.
        tokens_per_s_per_gpu: output tokens at the scenario's rate.
        tokens_per_s_per_user: 1 / mean TPOT.
    """

    label: str
    deployable: bool
    gpus: int
    power_w: float | None
    price_usd_per_hour: float | None
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    meets_slo: bool
    candidate: Candidate


def design_points(inputs: Inputs) -> tuple[DesignPoint, ...]:
    """Return every design point, those with the fewest GPUs first."""
    return sort_design_points(iter_design_points(inputs))


def sort_design_points(points: Iterable[DesignPoint]) -> tuple[DesignPoint, ...]:
    """Sort by GPUs, then latencies."""
    return tuple(sorted(points, key=lambda each: (each.gpus, each.ttft_s, each.tpot_s)))


def iter_design_points(inputs: Inputs) -> Iterator[DesignPoint]:
    """
    Forecast every legal layout at several batch limits and utilisations.

    Raises:
        InputError: the scenario cannot be planned at all.

    Ignores:
        Aggregated pools, which have no closed form, and the budget `cluster.max_gpus`.
    """
    seen: set[tuple[str, int]] = set()
    for smallest in list_candidates(inputs, StepModels(inputs), StepErrors()).split:
        for candidate in _sizes(smallest, inputs):
            key = (str(candidate), candidate.tandem.decode.max_batch_size)
            found = None if key in seen else _design_point(candidate, inputs)
            seen.add(key)
            if found is not None:
                yield found


def _sizes(smallest: Candidate, inputs: Inputs) -> Iterator[Candidate]:
    """Yield batch limits and, for each, replicas at several utilisations."""
    most = max(1, largest_batch(smallest, inputs.scenario.slo))
    for share in BATCH_SHARES:
        limited = smallest.limited(max(1, int(most * share)))
        one = limited.sized(1, 1).tandem
        needed = prefill.utilisation(one), decode.utilisation(one)
        for used in UTILISATIONS:
            replicas = [max(1, int(np.ceil(each / used))) for each in needed]
            yield limited.sized(*replicas)


def _design_point(candidate: Candidate, inputs: Inputs) -> DesignPoint | None:
    """Forecast one configuration; `None` where a pool saturates."""
    slo = inputs.scenario.slo
    predicted = forecast(candidate.tandem)
    if predicted is None:
        return None
    tokens = inputs.scenario.workload.requests_per_s * float(candidate.tandem.output_tokens.mean())
    return DesignPoint(
        label=str(candidate),
        deployable=profile_rule(inputs, candidate.layout) is None,
        gpus=candidate.gpus,
        power_w=inputs.power_w(candidate.gpus_by_kind),
        price_usd_per_hour=inputs.price_usd_per_hour(candidate.gpus_by_kind),
        ttft_s=predicted.ttft.quantile(slo.level),
        tpot_s=predicted.tpot.quantile(slo.level),
        output_tokens_per_s=tokens,
        tokens_per_s_per_gpu=tokens / candidate.gpus,
        tokens_per_s_per_user=1 / predicted.tpot.mean,
        meets_slo=meets(predicted, slo),
        candidate=candidate,
    )
