"""Bounds without queues, each against the simulation, which no bound may contradict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.plan import Inputs
from minicluster.specs.step import Interference
from minicluster.specs.workload import Lengths, RequestClass, WorkloadSpec
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner import bounds
from sizing.planner.bounds import QUANTILES
from sizing.planner.candidates import one_replica_each
from sizing.planner.configuration import Configuration
from sizing.planner.deployment import deployment
from sizing.planner.error_model import AS_PREDICTED, StepErrors
from sizing.planner.layout import Layout, LayoutShape
from sizing.planner.pool_sizing import PoolSizing, size_split_pools
from sizing.planner.predict import prediction_of
from sizing.planner.simulated_check import PlanVerdict, Simulations
from sizing.planner.step_models import StepModels, utilisations
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.planned import deployed_system
from tests.sizing.scenarios import SMALL, at

SPLIT = Layout.split(1, 1, "h100-sxm")
MIXED = Layout(prefill=None, decode=LayoutShape(slicing=SPLIT.decode.slicing, gpu="h100-sxm"))
VARIED = replace(
    SMALL,
    workload=replace(
        SMALL.workload,
        input_tokens=Lengths(distribution="uniform", low=500, high=6000),
        output_tokens=Lengths(distribution="uniform", low=50, high=600),
    ),
)


def started(
    case: Inputs, layout: Layout = SPLIT, **interference: float
) -> tuple[StepModels, Configuration]:
    """Return steps, which the other pool may slow, and one replica a pool."""
    one = one_replica_each(StepModels(case), layout)
    model = StepModels(case).of(layout, one.local_threshold_tokens)
    model = replace(model, interference=Interference(**interference))
    return StepModels(case, {(layout, one.local_threshold_tokens, AS_PREDICTED): model}), one


def simulated(models: StepModels, chosen: Configuration, requests: int = 3000) -> Outcome:
    """Simulate a configuration with step times as predicted."""
    return Simulations(models).outcome(chosen, AS_PREDICTED, requests=requests, seed=0)


@pytest.mark.parametrize("layout", [SPLIT, MIXED], ids=["split", "mixed"])
@pytest.mark.parametrize("threshold", [0, 2000])
def test_a_request_alone_takes_what_the_bound_says(layout: Layout, threshold: int) -> None:
    """At next to no load the percentiles of TTFT and TPOT are the bounds', within a percent."""
    search = replace(VARIED.search, local_threshold_tokens=threshold)
    case = at(1e-3, replace(VARIED, search=search))
    models, chosen = started(case, layout)
    outcome = simulated(models, chosen)
    found = bounds.unloaded_s(models.load(chosen))
    for name in ("ttft", "tpot"):
        values = outcome.series(name)[0]
        assert found[name].mean() == pytest.approx(values.mean(), rel=0.01), name
    assert np.quantile(found["ttft"], 0.99) == pytest.approx(
        np.quantile(outcome.series("ttft")[0], 0.99), rel=0.01
    )


@pytest.mark.parametrize("tokens", [10, 50, 200, 20_000])
def test_a_prefill_step_holds_what_takes_half_as_long_again(tokens: int) -> None:
    """As many equal prompts as take at most 1.5 times as long as one, within the token budget."""
    load = replace(SMALL.workload, input_tokens=Lengths.fixed(tokens), prefix_tokens=0)
    models, chosen = started(at(1.0, replace(SMALL, workload=load)))
    offered = models.load(chosen)
    count, budget = offered.prefill.max_batch_size, offered.prefill.max_batched_tokens
    longest_s = 1.5 * bounds.prefill_batch_s(offered, 1)

    assert count == 1 or (
        count * tokens <= budget and bounds.prefill_batch_s(offered, count) <= longest_s
    )
    assert (count + 1) * tokens > budget or bounds.prefill_batch_s(offered, count + 1) > longest_s
    assert (count > 1) == (tokens <= 200)


def test_the_context_of_classes_is_met_as_often_as_their_tokens() -> None:
    """Of an answer of o tokens o/2 are there on average, o^2/12 their variance (eq. T5)."""
    chat = RequestClass(
        name="a",
        requests_per_s=3,
        input_tokens=Lengths.fixed(1000),
        output_tokens=Lengths.fixed(200),
    )
    other = {"name": "b", "requests_per_s": 1, "input_tokens": Lengths.fixed(4000)}
    both = (chat, replace(chat, **other, output_tokens=Lengths.fixed(100)))
    means, variances, met = np.array([1100, 4050]), np.array([200, 100]) ** 2 / 12, [6 / 7, 1 / 7]
    mean = means @ met
    spread = (variances + (means - mean) ** 2) @ met
    models, chosen = started(at(1.0))
    one = models.load(chosen)
    for classes, expected in (((chat,), (1100, 200 / 12**0.5)), (both, (mean, spread**0.5))):
        rate = sum(each.requests_per_s for each in classes)
        load = WorkloadSpec(requests_per_s=rate, classes=classes)
        assert replace(one, workload=load).context == pytest.approx(expected)


LENGTHS = st.one_of(
    st.builds(Lengths.fixed, st.integers(1, 12_000)),
    st.tuples(st.integers(1, 500), st.integers(1, 6000)).map(
        lambda ends: Lengths(distribution="uniform", low=ends[0], high=sum(ends))
    ),
)


CASES = st.fixed_dictionaries(
    {
        "prompts": LENGTHS,
        "answer": st.integers(2, 300),
        "batch": st.integers(1, 128),
        "together": st.integers(1, 6),
        "local_share": st.sampled_from([0.0, 0.5, 1.0]),
        "rate": st.sampled_from([0.5, 5.0, 500.0]),
    }
)


@pytest.mark.parametrize("layout", [SPLIT, MIXED], ids=["split", "mixed"])
@given(drawn_case=CASES)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_simulation_is_below_a_bound(layout: Layout, drawn_case: dict[str, Any]) -> None:
    """Whatever shares a step: pools compute, and requests take, as long as bounds say or longer."""
    prompts, batch, rate = (drawn_case[name] for name in ("prompts", "batch", "rate"))
    share = drawn_case["local_share"]
    threshold = int(share * prompts.max_tokens) if layout is SPLIT else 0
    answers = Lengths.fixed(drawn_case["answer"])
    load = replace(SMALL.workload, input_tokens=prompts, output_tokens=answers)
    search = replace(SMALL.search, local_threshold_tokens=threshold)
    case = at(rate, replace(SMALL, workload=load, search=search))
    models, chosen = started(case, layout)
    chosen = chosen.limited(min(batch, chosen.batch_limit))
    if layout is SPLIT:
        together = {"prefill": drawn_case["together"]}
        chosen = replace(chosen, max_batch={**chosen.max_batch, **together})
    offered = models.load(chosen)
    arrivals = drawn(case.scenario.workload, RequestSource(), count=QUANTILES, seed=batch)
    lengths = np.random.default_rng(batch).permutation(offered.all_tokens).astype(np.int64)
    system = deployed_system(deployment(case, chosen), offered.step_model)
    outcome = simulate_system(system, replace(arrivals, input_tokens=lengths), seed=1)
    shares = {chosen.last: bounds.busy_decode(offered)}
    if offered.split and share < 1:
        shares["prefill"] = bounds.busy_prefill(offered)
    span_s = float((outcome.due_s + outcome.e2e_s).max() - outcome.due_s.min())
    for role, least in shares.items():
        busy_s, least_s = outcome.busy_fraction[role] * span_s, least / rate * QUANTILES
        assert busy_s >= least_s * (1 - 1e-9), (role, busy_s / least_s - 1)
    alone = bounds.unloaded_s(offered)
    assert (np.sort(outcome.ttft_s) >= alone["ttft"] * (1 - 1e-9)).all()
    assert outcome.tpot_s.mean() >= alone["tpot"].mean() * (1 - 1e-9)


@pytest.mark.parametrize("layout", [SPLIT, MIXED], ids=["split", "mixed"])
def test_no_simulation_beats_the_capacity(layout: Layout) -> None:
    """Overloaded pools finish as many requests a second as their capacity, and no more."""
    case = at(30.0, VARIED)
    models, one = started(case, layout)
    sizes = {"prefill": 2, "decode": 1} if layout is SPLIT else {"mixed": 2}
    chosen = one.limited(64).sized(sizes)
    capacity = 30.0 / max(utilisations(models, chosen).values())
    assert capacity < 25
    outcome = simulated(models, chosen)
    ends = np.sort(outcome.due_s + outcome.e2e_s)
    middle = ends[len(ends) // 4 : 3 * len(ends) // 4]
    achieved = (len(middle) - 1) / (middle[-1] - middle[0])
    assert achieved <= capacity * 1.03
    assert achieved >= capacity * (0.93 if layout is SPLIT else 0.75)


class Known(Simulations):
    """Simulations of pools that hold from certain sizes on."""

    def __init__(self, models: StepModels, least: tuple[int, int]) -> None:
        super().__init__(models)
        self.least = least

    def holds(
        self,
        chosen: Configuration,
        errors: StepErrors,  # noqa: ARG002
        *,
        seed: int = 0,  # noqa: ARG002
        quick: bool = False,  # noqa: ARG002
    ) -> PlanVerdict:
        """Return a verdict without a simulation."""
        short = [a < b for a, b in zip(chosen.replicas.values(), self.least, strict=True)]
        role = "" if not any(short) else "prefill" if short[0] else "decode"
        return PlanVerdict(holds=not any(short), bottleneck_role=role, requests=1)


SIZES = st.tuples(st.integers(1, 60), st.integers(1, 60))
MODELS, START = started(at(25.0))


def of_size(sizes: tuple[int, int]) -> Configuration:
    """Return so many replicas of prefill and decode."""
    return START.sized(dict(zip(("prefill", "decode"), sizes, strict=True)))


@settings(max_examples=40, deadline=None)
@given(least=SIZES, guess=SIZES)
def test_the_fewest_replicas_are_found_from_any_guess(
    least: tuple[int, int], guess: tuple[int, int]
) -> None:
    """The estimate decides nothing; what costs as much as what is known is not found."""
    sizing = PoolSizing(
        simulations=Known(MODELS, least),
        errors=AS_PREDICTED,
        quick=False,
        lowest=START,
        below=float("inf"),
        max_gpus=500,
    )
    assert size_split_pools(sizing, of_size(guess)) == of_size(least)
    tight = replace(sizing, below=500.0, max_gpus=sum(least) + 4)  # a pool grows to the budget
    near = of_size((max(1, least[0] - 10), least[1]))
    assert size_split_pools(tight, near) == of_size(least)
    for below, affordable in ((sum(least), False), (sum(least) + 1, True)):
        found = size_split_pools(replace(sizing, below=below), of_size(least))
        assert (found is not None) is affordable


def test_utilisation_knows_the_interference() -> None:
    """Prefill's predicted utilisation is the simulated busy share; each share costs capacity."""
    case = at(4.0)
    slowed = {"prefill_fraction": 0.2, "prefill_per_sequence_fraction": 0.002}
    shares = []
    for between_pools in ({}, slowed, slowed | {"decode_fraction": 0.5}):
        models, chosen = started(case, **between_pools)
        outcome = simulated(models, chosen)
        predicted = prediction_of(models, chosen, outcome)
        used = predicted.utilisation_fraction
        assert used["prefill"] == pytest.approx(outcome.busy_fraction["prefill"], rel=0.05)
        assert predicted.capacity_requests_per_s == pytest.approx(4.0 / max(used.values()))
        shares.append(used)
    assert shares[0]["prefill"] < shares[1]["prefill"]
    assert shares[1]["decode"] < shares[2]["decode"]


def test_the_context_of_equal_requests_by_hand() -> None:
    """Between n and n + o tokens, evenly: n + o/2 on average, o/sqrt(12) apart (eq. T5)."""
    load = replace(
        SMALL.workload, input_tokens=Lengths.fixed(1000), output_tokens=Lengths.fixed(600)
    )
    models, chosen = started(at(1.0, replace(SMALL, workload=load)))
    assert models.load(chosen).context == pytest.approx((1300, 600 / 12**0.5))
