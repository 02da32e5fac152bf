"""List prices: medians of dated lists, opt in; a GPU without one is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from statistics import median

import pytest

from minicluster.errors import InputError
from sizing import catalog
from sizing.catalog.gpu import list_price
from sizing.planner.studies.cost import price_source
from sizing.scenario import Scenario

SCENARIO = "llama-3.1-8b-h100"
LISTED = {"cost.prices": "catalog"}


def test_every_price_is_of_a_known_gpu_on_a_dated_list() -> None:
    """Names are those of configs/gpus; each list says its date and where it was read."""
    for each in catalog.price_lists():
        assert set(each.usd_per_gpu_hour) <= set(catalog.gpus())
        assert date.fromisoformat(each.date) <= date(2026, 11, 25)
        assert each.document


@pytest.mark.parametrize("gpu", catalog.gpus())
def test_the_list_price_is_the_median(gpu: str) -> None:
    """The price is the median of the lists that have the GPU; without any there is none."""
    asked = [
        each.usd_per_gpu_hour[gpu] for each in catalog.price_lists() if gpu in each.usd_per_gpu_hour
    ]
    found = list_price(gpu)
    assert (found is None) == (not asked)
    if found is not None:
        assert found.usd_per_gpu_hour == median(asked)
        assert (found.lowest_usd_per_gpu_hour, found.highest_usd_per_gpu_hour) == (
            min(asked),
            max(asked),
        )
        assert (found.lists, found.oldest <= found.newest) == (len(asked), True)


def test_list_prices_are_opt_in_and_behind_your_own() -> None:
    """Without the key there is no price; with it that of the lists, unless yours is given."""
    gpus = {"h100-sxm": 2}
    listed = list_price("h100-sxm")
    assert listed is not None
    assert Scenario.load(SCENARIO).price_usd_per_hour(gpus) is None
    found = Scenario.load(SCENARIO, LISTED)
    assert found.price_usd_per_hour(gpus) == 2 * listed.usd_per_gpu_hour
    own = Scenario.load(SCENARIO, {**LISTED, "cluster.price_usd_per_gpu_hour": 1.5})
    assert own.price_usd_per_hour(gpus) == 3.0


def test_a_gpu_without_a_list_price_is_refused() -> None:
    """By its name, with the way out; a price of your own is one."""
    asked = {**LISTED, "cluster.gpu": "mi325x"}
    with pytest.raises(InputError, match="none of mi325x"):
        Scenario.load(SCENARIO, asked)
    assert Scenario.load(SCENARIO, {**asked, "cluster.price_usd_per_gpu_hour": 2.0})


def test_the_source_says_dates_and_warns_after_a_year() -> None:
    """Range and dates stand beside a list price; an old list is told apart."""
    given = Scenario.load(SCENARIO, LISTED)
    (price,) = given.list_prices
    old = replace(given, list_prices=(replace(price, oldest="2025-11-24"),))
    today = date(2026, 11, 25)
    assert f"{price.oldest} to {price.newest}" in price_source(given, ["h100-sxm"], today)
    assert "OLDER" not in price_source(given, ["h100-sxm"], today)
    assert "OLDER THAN A YEAR" in price_source(old, ["h100-sxm"], today)
    assert price_source(Scenario.load(SCENARIO), ["h100-sxm"]) == "yours"
