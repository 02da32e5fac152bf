"""A day: bounds of GPU-hours and attainment, what cold starts cost, a run of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sizing as package
from minicluster.workload.day_profile import DayProfile
from sizing.planner.studies.day import Day, DayOptions, day
from sizing.scenario import Scenario
from tests.pages import figures_in
from tests.sizing.conftest import Sizing

SCENARIO = "llama-3.1-8b-h100"
QUICK = {"search.pools": "mixed", "search.tp": [1], "search.confidence_fraction": 0.5}
BURSTS = DayProfile(requests_per_s=(12.0, 60.0) * 12)
"""An hour up, an hour down, all day."""


def run(**options: float) -> Day:
    """Return a day of bursts."""
    given: dict[str, float] = {"cold_start_s": 0.0, **options}
    return day(Scenario.load(SCENARIO, QUICK), BURSTS, DayOptions(**given))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def quick() -> Day:
    """Return a day whose replicas answer at once."""
    return run()


def test_between_one_replica_and_the_plan(quick: Day) -> None:
    """More static replicas take more GPU-hours, up to those of the static pool, which attains."""
    assert quick.static_gpu_hours == 24 * quick.static_gpus
    hours = [each.gpu_hours for each in quick.runs]
    assert hours == sorted(hours)
    assert [each.static_fraction for each in quick.runs] == sorted(
        each.static_fraction for each in quick.runs
    )
    assert (quick.runs[-1].static_fraction, quick.runs[-1].attained_fraction) == (1.0, 1.0)
    assert all(max(each.gpus) <= quick.static_gpus for each in quick.runs)
    assert all(min(each.gpus) >= each.static_gpus for each in quick.runs)
    assert quick.scaled.gpu_hours < quick.static_gpu_hours


def test_the_best_share_is_the_cheapest_that_attains(quick: Day) -> None:
    """No run with fewer GPU-hours has the attainment that was asked for."""
    late = run(cold_start_s=1500.0, margin=0.0, hold_s=0.0)
    for found in (quick, late):
        asked = found.options.attainment
        assert found.best.attained_fraction >= asked
        for each in found.runs:
            assert each.attained_fraction < asked or each.gpu_hours >= found.best.gpu_hours
    assert late.best.static_gpus > late.scaled.static_gpus


def test_cold_starts_cost_attainment_and_no_gpu_hours(quick: Day) -> None:
    """A replica that loads is paid for as one that answers; meanwhile requests find too few."""
    late = run(cold_start_s=900.0)
    assert [each.gpu_hours for each in late.runs] == [each.gpu_hours for each in quick.runs]
    assert late.scaled.attained_fraction < quick.scaled.attained_fraction
    (role,) = late.scaled.replicas
    pairs = zip(late.scaled.replicas[role], quick.scaled.replicas[role], strict=True)
    assert all(answering <= ordered for answering, ordered in pairs)


def test_forecast_errors_are_drawn_from_the_seed(quick: Day) -> None:
    """Equal seeds give equal days, and errors change what is ordered."""
    wrong, again = (run(forecast_error_fraction=0.3, seed=1) for _ in range(2))
    assert wrong == again
    assert wrong.scaled.gpus != quick.scaled.gpus


def test_a_flat_day_has_nothing_to_scale() -> None:
    """At the planned rate all day the policy asks for the plan's replicas all day."""
    flat = DayProfile(requests_per_s=(50.0, 50.0))
    found = day(Scenario.load(SCENARIO, QUICK), flat, DayOptions(cold_start_s=600.0))
    assert found.best.gpu_hours == found.static_gpu_hours
    assert found.best.attained_fraction == 1


def test_command(sizing: Sizing, tmp_path: Path) -> None:
    """The answer comes first; JSON and page say the same; split pools scale each."""
    page = tmp_path / "day.html"
    keys = ("--set", "search.tp=[1]", "--set", "search.pools=split", "--cold-start-seconds", "60")
    asked = ("day", SCENARIO, "--profile", "sine-day", *keys)
    done = sizing(*asked, "--json", "--html", str(page))
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert set(found["best"]["replicas"]) == {"prefill", "decode"}
    assert len(found["requests_per_s"]) == 288
    rates, gpus, _ = figures_in(page.read_text(encoding="utf-8"))
    assert sum(gpus["data"][0]["y"]) == found["static_gpu_hours"]
    assert sum(gpus["data"][1]["y"]) == pytest.approx(found["best"]["gpu_hours"], rel=1e-4)
    assert len(rates["data"][0]["y"]) == 24
    screen = sizing(*asked, "--interval-seconds", "7200")
    first, *_ = screen.out.splitlines()
    assert "GPU-hours a day" in first
    assert "best static share" in screen.out


def test_in_python(tmp_path: Path) -> None:
    """A file's profile, and columns for pandas."""
    file = tmp_path / "day.csv"
    file.write_text("hour,peak_fraction\n0,0.5\n12,1\n")
    chat = package.Scenario.load(SCENARIO, QUICK | {"workload.requests_per_s": 40})
    profile = package.read_profile(file, chat.scenario.workload.requests_per_s)
    found = package.day(chat, profile, package.DayOptions(cold_start_s=60.0, interval_s=3600.0))
    assert "GPU-hours a day" in found._repr_html_()
