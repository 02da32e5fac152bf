"""What a configuration has to prove: beyond chance, with measured errors, on a fresh seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizing.planner.candidates import one_replica_each
from sizing.planner.configuration import Configuration
from sizing.planner.error_model import AS_PREDICTED, StepErrors
from sizing.planner.layout import Layout
from sizing.planner.simulated_check import VERIFY_SEED, PlanVerdict, Simulations, verified
from sizing.planner.step_models import StepModels
from tests.sizing.scenarios import SMALL, at, proposed

RATE = 5.0
LOOSE_S = 0.3
"""TTFT limit that the configuration below keeps with room, TTFT closest of all limits."""


def simulations(**slo: float) -> Simulations:
    """Return simulations under limits."""
    return Simulations(StepModels(at(RATE, **slo)))


def chosen(prefill: int = 2, decode: int = 1) -> Configuration:
    """Return two prefill replicas and one for decode, each a quarter full, or others."""
    one = one_replica_each(StepModels(at(RATE)), Layout.split(1, 1, "h100-sxm"))
    return one.sized({"prefill": prefill, "decode": decode})


def judged(ttft_s: float, *, quick: bool = False, errors: StepErrors = AS_PREDICTED) -> PlanVerdict:
    """Return the verdict on `chosen` under a limit on TTFT."""
    return simulations(ttft_s=ttft_s).holds(chosen(), errors, seed=VERIFY_SEED, quick=quick)


def test_what_chance_leaves_open_is_no_proof() -> None:
    """A limit just above the simulated percentile counts as missed; a look believes in it."""
    for quick in (False, True):
        loose = judged(LOOSE_S, quick=quick)
        assert loose.holds
        assert loose.check is not None
        tight = judged(loose.check.seconds * 1.0001, quick=quick)
        assert tight.check is not None
        assert tight.check.ratio < 1
        assert tight.holds is quick
        assert judged(loose.check.seconds * 0.9, quick=quick).holds is False


@pytest.mark.parametrize(
    ("errors", "bottleneck_role"),
    [(StepErrors(ttft=1.5), "prefill"), (StepErrors(tpot=4.0), "decode")],
)
def test_latencies_as_far_off_as_those_of_measured_loads_have_to_hold(
    errors: StepErrors, bottleneck_role: str
) -> None:
    """What holds when simulated is denied where the prediction, off as others were, misses."""
    verdict = judged(LOOSE_S, errors=errors)
    assert (verdict.holds, verdict.bottleneck_role) == (False, bottleneck_role)


@pytest.mark.parametrize(("prefill", "decode", "role"), [(1, 9, "prefill"), (99, 1, "decode")])
def test_a_saturated_pool_needs_no_simulation(prefill: int, decode: int, role: str) -> None:
    verdict = simulations().at_rate(1000.0).holds(chosen(prefill, decode), AS_PREDICTED)
    assert verdict == PlanVerdict(holds=False, bottleneck_role=role, requests=0)


class Doubtful(Simulations):
    """Simulations whose seed 0 holds always, other seeds with three decode replicas or more."""

    def holds(
        self,
        chosen: Configuration,
        errors: StepErrors,  # noqa: ARG002
        *,
        seed: int = 0,
        quick: bool = False,  # noqa: ARG002
    ) -> PlanVerdict:
        """Return a verdict without a simulation."""
        holds = seed == 0 or chosen.replicas["decode"] >= 3
        return PlanVerdict(holds=holds, bottleneck_role="" if holds else "decode", requests=1)


def test_luck_of_the_first_seed_is_not_believed() -> None:
    """The pool that a fresh seed blames grows until both agree, as long as that is worth it."""
    doubtful = Doubtful(StepModels(at(RATE)))
    proof = verified(doubtful, chosen(), AS_PREDICTED, below=float("inf"))
    assert proof is not None
    grown, verdicts = proof
    assert grown.replicas == {"prefill": 2, "decode": 3}
    assert all(each.holds for each in verdicts)
    assert verified(doubtful, chosen(), AS_PREDICTED, below=grown.gpus) is None


def test_no_pool_is_busier_than_the_scenario_allows() -> None:
    """An allowed utilisation far below what the SLO needs takes replicas of both pools."""
    allowed = replace(SMALL, search=replace(SMALL.search, max_utilisation_fraction=0.2))
    busy = proposed(at(20.0, allowed)).prediction.utilisation_fraction
    assert set(busy) == {"prefill", "decode"}
    assert max(busy.values()) <= 0.2
