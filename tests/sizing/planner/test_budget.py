"""Budgets in dollars and watts: a plan keeps them, or the answer says what it would take."""

from __future__ import annotations

import math

import pytest

from minicluster.errors import InputError
from sizing.planner.plan import NoPlan, plan, search_within_budgets
from sizing.planner.result import Infeasible
from sizing.planner.search import search
from sizing.planner.simulated_check import Found
from sizing.planner.studies.capacity import gpus_for_usd, gpus_within_budgets
from sizing.planner.studies.decisions import decisions
from sizing.planner.studies.result import plan_scenario
from sizing.scenario import Scenario

SCENARIO = "llama-3.1-8b-h100"
QUICK = {"search.pools": "mixed", "workload.requests_per_s": 10}
PRICE = {"cluster.price_usd_per_gpu_hour": 2.0}


def asked(**keys: float) -> Scenario:
    """Return a scenario at two dollars a GPU with keys of `[cost]`."""
    budgets = {f"cost.{key}": value for key, value in keys.items()}
    return Scenario.load(SCENARIO, {**QUICK, **PRICE, **budgets})


@pytest.fixture(scope="module")
def needed() -> int:
    """Return the GPUs that hold the SLO without a budget."""
    found = search(asked())
    assert isinstance(found, Found)
    return found.configuration.gpus


def test_a_budget_that_is_enough_changes_nothing(needed: int) -> None:
    """At exactly what the plan takes it is the plan."""
    found = search_within_budgets(asked(max_usd_per_hour=2.0 * needed, max_power_w=700.0 * needed))
    assert isinstance(found, Found)
    assert found.configuration.gpus == needed


def test_a_budget_that_is_too_small_is_an_answer(needed: int) -> None:
    """The answer says what holds the SLO, what it takes, and by how much the budget is missed."""
    usd = 2.0 * needed
    found = search_within_budgets(asked(max_usd_per_hour=usd - 0.5))
    assert isinstance(found, Infeasible)
    assert f"holds with {needed} h100-sxm at ${usd:.2f}/h" in found.reason
    assert (found.binds, found.missed_by) == ("max_usd_per_hour", "$0.50/h")
    assert (found.nearest_gpus, found.way_out.split(",")[0]) == (
        needed,
        f"cost.max_usd_per_hour = {usd:g}",
    )
    watts = search_within_budgets(asked(max_power_w=700.0 * needed - 100))
    assert isinstance(watts, Infeasible)
    assert (watts.binds, watts.missed_by) == ("max_power_w", "0.1 kW")


def test_energy_is_in_the_budget(needed: int) -> None:
    """Where energy is paid apart the budget has to cover it, too."""
    given = asked(max_usd_per_hour=2.0 * needed).with_({"cluster.energy_usd_per_kwh": 0.1})
    assert isinstance(search_within_budgets(given), Infeasible)


def test_spares_are_in_the_budget(needed: int) -> None:
    """A spare replica is paid for like the others."""
    given = asked(max_usd_per_hour=2.0 * needed).with_({"search.spare_replicas": 1})
    found = search_within_budgets(given)
    assert isinstance(found, Infeasible)
    assert found.nearest_gpus == plan(given.with_({"cost.max_usd_per_hour": None})).cost.gpus


def test_of_several_gpus_the_cheaper_kind_is_taken() -> None:
    """Where the fewest GPUs cost too much, more of another kind may hold within the budget."""
    kinds = {
        "search.gpus": ["h100-sxm", "h200-sxm"],
        "search.prices_usd_per_gpu_hour": {"h100-sxm": 2.0, "h200-sxm": 9.0},
        "workload.requests_per_s": 30,
    }
    given = Scenario.load(SCENARIO, {**QUICK, **kinds})
    free = search_within_budgets(given)
    assert isinstance(free, Found)
    assert set(free.configuration.gpus_by_kind) == {"h200-sxm"}
    bought = plan(given.with_({"cost.max_usd_per_hour": 10}))
    assert bought.cost.price_usd_per_hour is not None
    assert bought.cost.price_usd_per_hour <= 10
    with pytest.raises(NoPlan, match="max_usd_per_hour"):
        plan(given.with_({"cost.max_usd_per_hour": 1}))


def test_a_budget_needs_a_price() -> None:
    """Dollars of GPUs without a price are refused by name."""
    with pytest.raises(InputError, match="a price of every GPU \\(h100-sxm\\)"):
        plan_scenario(Scenario.load(SCENARIO, {**QUICK, "cost.max_usd_per_hour": 9}), "x")


def test_decisions_count_gpus_beyond_a_budget(needed: int) -> None:
    """A change that needs more than the budget has still says how many GPUs that is."""
    found = decisions(asked(max_usd_per_hour=2.0 * needed), only=["spares"])
    (spare,) = found.rows
    assert spare.against_gpus is not None
    assert spare.against_gpus > 0
    assert not spare.result.plans


def test_dollars_buy_gpus() -> None:
    """A budget of a capacity curve is the GPUs that it pays for; less than one is refused."""
    assert gpus_for_usd(asked(), 17.0) == 8
    assert gpus_for_usd(asked(), 16.0) == 8
    for amount in (1.0, math.nan, math.inf, 1e12):
        with pytest.raises(InputError, match="--usd-per-hour"):
            gpus_for_usd(asked(), amount)
    with pytest.raises(InputError, match="price"):
        gpus_for_usd(Scenario.load(SCENARIO), 17.0)


def test_dollars_that_pay_for_whole_gpus_buy_them_all() -> None:
    """Also where the quotient of two decimal numbers is a little less than whole."""
    for count in range(1, 16):
        usd = 0.7 * count
        given = asked(max_usd_per_hour=usd).with_({"cluster.price_usd_per_gpu_hour": 0.7})
        assert gpus_for_usd(given, usd) == gpus_within_budgets(given) == count


def test_budgets_bound_the_gpus_of_a_capacity_curve() -> None:
    """The tightest of GPUs, dollars and watts; a budget below one GPU is refused by name."""
    assert gpus_within_budgets(asked()) == 16
    assert gpus_within_budgets(asked(max_usd_per_hour=9.0)) == 4
    assert gpus_within_budgets(asked(max_usd_per_hour=9.0, max_power_w=2100.0)) == 3
    with pytest.raises(InputError, match=r"cost.max_power_w.*at least 700, for one h100-sxm"):
        gpus_within_budgets(asked(max_power_w=600.0))
