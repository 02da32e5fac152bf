"""Design points: every layout at several sizes, each with its cost and latencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.planner.candidates import (
    Candidate,
    largest_batch,
    list_candidates,
    utilisations,
    with_search,
)
from sizing.planner.error_model import StepErrors
from sizing.planner.layout import profile_rule
from sizing.planner.predict import prediction_of, slo_misses
from sizing.planner.simulated_check import Simulations
from sizing.planner.step_models import StepModels

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from minicluster.plan import Inputs

UTILISATIONS = (0.9, 0.75, 0.5, 0.3)
"""Utilisations at which pools are sized: from few GPUs with long queues to many without."""

REQUESTS = 800
"""Simulated requests of a design point: its place in a picture, not a promise."""

BATCH_SHARES = (1.0, 0.5, 0.25)
"""Shares of the largest decode batch: they trade tokens/s per GPU for tokens/s per user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignPoint:
    """
    One configuration under the scenario's load, by a short simulation.

    Attributes:
        label: as `sizing predict` takes it.
        deployable: whether the engine profile allows it.
        power_w: of its GPUs; `None` where a GPU's power is unknown.
        price_usd_per_hour: `None` where the scenario gives no price.
        ttft_s: at the SLO's percentile.
        tpot_s: likewise.
        tokens_per_s_per_gpu: output tokens at the scenario's rate.
        tokens_per_s_per_user: 1 / mean TPOT; 0 where no answer has a second token.
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
    Simulate every legal layout at several batch limits and utilisations.

    Raises:
        InputError: the scenario cannot be planned at all.

    Ignores:
        Aggregated pools, and the budget `cluster.max_gpus`.
    """
    seen: set[tuple[str, int]] = set()
    simulations = Simulations(inputs)
    inputs = with_search(inputs, pools="split")
    for smallest in list_candidates(inputs, StepModels(inputs), StepErrors()).split:
        for candidate in _sizes(smallest, inputs):
            key = (str(candidate), candidate.tandem.decode.max_batch_size)
            found = None if key in seen else _design_point(candidate, simulations)
            seen.add(key)
            if found is not None:
                yield found


def _sizes(smallest: Candidate, inputs: Inputs) -> Iterator[Candidate]:
    """Yield batch limits and, for each, replicas at several utilisations."""
    most = max(1, largest_batch(smallest, inputs.scenario.promises))
    for share in BATCH_SHARES:
        limited = smallest.limited(max(1, int(most * share)))
        needed = utilisations(limited.sized(1, 1)).values()
        for used in UTILISATIONS:
            replicas = [max(1, int(np.ceil(each / used))) for each in needed]
            yield limited.sized(*replicas)


def _design_point(candidate: Candidate, simulations: Simulations) -> DesignPoint | None:
    """Simulate one configuration; `None` where a pool saturates."""
    if max(utilisations(candidate).values()) >= 1:
        return None
    inputs = simulations.inputs
    slo = inputs.scenario.slo
    outcome = simulations.outcome(candidate, requests=REQUESTS, seed=0)
    predicted = prediction_of(inputs, candidate, outcome)
    return DesignPoint(
        label=str(candidate),
        deployable=profile_rule(inputs, candidate.layout) is None,
        gpus=candidate.gpus,
        power_w=inputs.power_w(candidate.gpus_by_kind),
        price_usd_per_hour=inputs.price_usd_per_hour(candidate.gpus_by_kind),
        ttft_s=predicted.ttft.at(slo.percentile),
        tpot_s=predicted.tpot.at(slo.percentile),
        output_tokens_per_s=predicted.output_tokens_per_s,
        tokens_per_s_per_gpu=predicted.output_tokens_per_s / candidate.gpus,
        tokens_per_s_per_user=0.0 if not predicted.tpot.mean_s else 1 / predicted.tpot.mean_s,
        meets_slo=not slo_misses(predicted, inputs.scenario.promises),
        candidate=candidate,
    )
