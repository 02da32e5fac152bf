"""The autoscaling policy: bounds, monotony, and no change within the hold time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.plan.scaling import ScaledPool, held_intervals, wanted_replicas

RATES = st.floats(0.0, 1e4)


@st.composite
def scaled(draw: st.DrawFn) -> ScaledPool:
    """Draw a pool of a plan: busy replicas may be more than those that the SLO needs."""
    most = draw(st.integers(1, 200))
    return ScaledPool(
        role="decode",
        most=most,
        spares=draw(st.integers(0, most - 1)),
        busy=draw(st.floats(0.01, 210.0)),
        planned_requests_per_s=draw(st.floats(0.01, 1e3)),
        gpus=draw(st.sampled_from([1, 4, 8])),
    )


@given(pool=scaled(), rate=RATES)
def test_from_one_replica_to_the_plans(pool: ScaledPool, rate: float) -> None:
    """There are never fewer than one replica and the spares, and never more than planned."""
    assert min(pool.most, 1 + pool.spares) <= pool.replicas(rate) <= pool.most
    assert pool.replicas(0.0) == min(pool.most, 1 + pool.spares)


@given(pool=scaled(), factor=st.floats(1.0, 10.0))
def test_the_planned_rate_takes_the_plans_replicas(pool: ScaledPool, factor: float) -> None:
    """So does any higher rate."""
    assert pool.replicas(factor * pool.planned_requests_per_s) == pool.most


@given(pool=scaled(), rates=st.tuples(RATES, RATES))
def test_a_higher_rate_never_takes_fewer(pool: ScaledPool, rates: tuple[float, float]) -> None:
    """Replicas are monotone in the rate, and so in the margin."""
    low, high = sorted(rates)
    assert pool.replicas(low) <= pool.replicas(high)
    margins = (wanted_replicas([pool], [high], margin=each) for each in (0.0, 0.3))
    assert next(margins)["decode"] <= next(margins)["decode"]


@given(pool=scaled(), rates=st.lists(RATES, min_size=20, max_size=40), held=st.integers(1, 10))
def test_no_replica_goes_within_the_hold_time(
    pool: ScaledPool, rates: list[float], held: int
) -> None:
    """Replicas stay for the whole hold time of the rate that asked for them."""
    counts = [
        wanted_replicas([pool], rates[at + 1 - held : at + 1])["decode"]
        for at in range(held - 1, len(rates))
    ]
    for at, rate in enumerate(rates[held - 1 :]):
        alone = wanted_replicas([pool], [rate])["decode"]
        assert all(count >= alone for count in counts[at : at + held])
    steady = [wanted_replicas([pool], [rates[0]] * held) for _ in range(3)]
    assert all(one == two for one, two in pairwise(steady))


@given(pool=scaled(), rate=RATES, floor=st.integers(1, 300))
def test_a_static_share_always_stays(pool: ScaledPool, rate: float, floor: int) -> None:
    """A floor raises what the policy asks for, up to the plan, and changes nothing above it."""
    free = wanted_replicas([pool], [rate])["decode"]
    found = wanted_replicas([pool], [rate], floor={"decode": floor})["decode"]
    assert found == min(pool.most, max(floor, free))


def test_reserve_grows_with_the_root_of_the_load() -> None:
    """At a quarter of the rate a quarter of the busy replicas and half of the reserve are kept."""
    pool = ScaledPool(
        role="prefill", most=100, spares=0, busy=80.0, planned_requests_per_s=10.0, gpus=1
    )
    assert pool.replicas(2.5) == 80 / 4 + 20 / 2


def test_intervals_of_the_hold_time() -> None:
    """The last interval counts too; what cannot be is refused by the option's name."""
    assert [held_intervals(hold_s, 60.0) for hold_s in (0.0, 60.0, 90.0)] == [1, 2, 3]
    for hold_s, margin, option in ((-1.0, 0.1, "--hold-seconds"), (1.0, -0.1, "--margin")):
        with pytest.raises(InputError, match=option):
            held_intervals(hold_s, 60.0, margin)
