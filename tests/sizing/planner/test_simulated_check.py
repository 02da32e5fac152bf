"""What a configuration has to prove: beyond chance, with measured errors, on a fresh seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizing.planner.candidates import Candidate, one_replica_each
from sizing.planner.error_model import StepErrors
from sizing.planner.layout import Layout
from sizing.planner.result import PlanVerdict
from sizing.planner.simulated_check import VERIFY_SEED, Simulations, SloSimulator, verify_sizes
from sizing.planner.step_models import StepModels
from tests.sizing.scenarios import SMALL, at, proposed

RATE = 5.0
LOOSE_S = 0.3
"""TTFT limit that the configuration below keeps with room, TTFT closest of all limits."""


def chosen() -> Candidate:
    """Return two prefill replicas and one for decode, each a quarter full."""
    given = at(RATE)
    return one_replica_each(given, Layout.split(1, 1, "h100-sxm"), StepModels(given)).sized(2, 1)


def judged(ttft_s: float, *, precise: bool = True, errors: StepErrors | None = None) -> PlanVerdict:
    """Return the verdict on `chosen` under a limit on TTFT."""
    simulator = SloSimulator(
        Simulations(at(RATE, ttft_s=ttft_s)), errors or StepErrors(), precise=precise
    )
    return simulator.verdict(chosen(), seed=VERIFY_SEED)


def test_what_chance_leaves_open_is_no_proof() -> None:
    """A limit just above the simulated percentile counts as missed; a look believes in it."""
    for precise in (True, False):
        loose = judged(LOOSE_S, precise=precise)
        assert loose.holds
        assert loose.check is not None
        tight = judged(loose.check.seconds * 1.0001, precise=precise)
        assert tight.check is not None
        assert tight.check.ratio < 1
        assert tight.holds is not precise
        assert judged(loose.check.seconds * 0.9, precise=precise).holds is False


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
    simulator = SloSimulator(Simulations(at(RATE)), StepErrors())
    full = chosen().sized(prefill, decode).at_rate(1000.0)
    assert simulator.verdict(full) == PlanVerdict(holds=False, bottleneck_role=role, requests=0)


class Doubtful(SloSimulator):
    """A simulator whose seed 0 holds always, other seeds with three decode replicas or more."""

    def verdict(self, candidate: Candidate, *, seed: int = 0) -> PlanVerdict:
        """Return a verdict without a simulation."""
        holds = seed == 0 or candidate.replicas["decode"] >= 3
        return PlanVerdict(holds=holds, bottleneck_role="" if holds else "decode", requests=1)


def test_luck_of_the_first_seed_is_not_believed() -> None:
    """The pool that a fresh seed blames grows until both agree, as long as that is worth it."""
    given = at(RATE)
    simulator = Doubtful(Simulations(given), StepErrors())
    proof = verify_sizes(given, simulator, chosen(), below=float("inf"))
    assert proof is not None
    grown, verdicts = proof
    assert grown.replicas == {"prefill": 2, "decode": 3}
    assert all(each.holds for each in verdicts)
    assert verify_sizes(given, simulator, chosen(), below=grown.gpus) is None


def test_no_pool_is_busier_than_the_scenario_allows() -> None:
    """An allowed utilisation far below what the SLO needs takes replicas of both pools."""
    allowed = replace(SMALL, search=replace(SMALL.search, max_utilisation_fraction=0.2))
    busy = proposed(at(20.0, allowed)).prediction.utilisation_fraction
    assert set(busy) == {"prefill", "decode"}
    assert max(busy.values()) <= 0.2
