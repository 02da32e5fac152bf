"""compare, sweep, pareto, losses and the page: figures, streams, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.pages.page import Page
from minicluster.pages.write import render
from minicluster.plan import Plan, read_plan
from minicluster.stats.shares import LEVELS
from sizing.planner.studies.cost import running
from sizing.planner.studies.grid import parse_key, points
from sizing.planner.studies.loss import losses, without_one
from sizing.planner.studies.pareto import DesignPoint, front, fronts
from sizing.report.plan_page import plan_page
from tests.pages import figures_in
from tests.sizing.conftest import Sizing

SCENARIO = "llama-3.1-8b-h100"
PRICE = "cluster.price_usd_per_gpu_hour=2.5"
SPLIT = ("--set", "search.pools=split")
"""Half of the search, where the kind of pools is not the subject."""


@pytest.fixture(scope="module")
def path(plan_of: Callable[..., Path]) -> Path:
    """Return the file of a plan."""
    return plan_of(SCENARIO, "--set", PRICE)


@pytest.fixture(scope="module")
def plan(path: Path) -> Plan:
    """Return the plan."""
    return read_plan(path)


def test_cost_by_hand(plan: Plan) -> None:
    """Watts and dollars over tokens; the user's numbers are marked, and go before the catalog's."""
    tokens_per_s = 20.0 * 300
    found = running(plan)
    assert found.power_w == plan.cost.gpus * 700.0
    assert found.joules_per_output_token == pytest.approx(plan.cost.gpus * 700 / tokens_per_s)
    usd = plan.cost.gpus * 2.5
    assert found.usd_per_million_output_tokens == pytest.approx(1e6 * usd / 3600 / tokens_per_s)
    assert (found.power_source, found.price_source) == ("datasheet, GPUs alone", "yours")
    scenario = plan.inputs.scenario
    cluster = replace(scenario.cluster, power_w_per_gpu=1200.0, energy_usd_per_kwh=0.2)
    inputs = replace(plan.inputs, scenario=replace(scenario, cluster=cluster))
    paid = running(replace(plan, inputs=inputs))
    assert (paid.power_w, paid.power_source) == (plan.cost.gpus * 1200.0, "yours")
    assert paid.usd_per_hour == pytest.approx(usd + plan.cost.gpus * 1.2 * 0.2)


def test_compare_gpus(sizing: Sizing) -> None:
    """Feasible and infeasible GPUs in one answer; the least is named."""
    prices = ("--price", "h100=2.5", "--price", "h200-sxm=4", "--price", "l4=0.5")
    done = sizing("compare", SCENARIO, "--gpu", "h100,h200-sxm,l4", *prices, "--by", "usd",
                  "--set", "slo.ttft_s=0.3", *SPLIT, "--json")  # fmt: skip
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    h100, h200, l4 = document["answers"]
    assert [h100["label"], h200["label"]] == ["h100-sxm", "h200-sxm"]
    least = min((h100, h200), key=lambda each: each["running"]["usd_per_hour"])
    assert document["best"] == least["label"]
    assert l4["feasible"] is False
    assert "holds the SLO" in l4["reason"] or "max_gpus" in l4["reason"]
    assert l4["infeasible"]["binds"] == "SLO floor"
    for each in (h100, h200):
        assert "infeasible" not in each
        assert each["headroom_factor"] >= 1
        assert each["nodes"] * 8 >= each["gpus"]


def test_compared_scenarios_are_called_by_their_names(sizing: Sizing) -> None:
    """Also where a name has a dot; nothing holds the limit, which is a negative answer."""
    names = ["llama-3.1-8b-h100", "llama-3.1-70b-h100"]
    done = sizing("compare", *names, "--set", "slo.ttft_s=0.0001", "--json")
    assert done.code == 3
    assert [each["label"] for each in json.loads(done.out)["answers"]] == names


def test_sweep_is_a_cross_product(sizing: Sizing, tmp_path: Path) -> None:
    """Every combination in order; charts of those with a plan, a reason for the others."""
    target = tmp_path / "sweep.html"
    keys = ("--key", "workload.requests_per_s=5,20", "--key", "slo.tpot_s=0.0001,0.05")
    done = sizing("sweep", SCENARIO, *SPLIT, *keys, "--json", "--html", str(target))
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    values = [tuple(each["values"].values()) for each in found]
    assert values == [("5", "0.0001"), ("5", "0.05"), ("20", "0.0001"), ("20", "0.05")]
    assert [each["feasible"] for each in found] == [False, True, False, True]
    assert "limit 100 µs" in found[0]["reason"]
    planned = found[1::2]
    assert planned[0]["gpus"] <= planned[1]["gpus"]
    html = target.read_text(encoding="utf-8")
    scales = {"gpus": 1, "ttft_s": 1000, "tpot_s": 1000, "headroom_factor": 1}
    for figure, (key, scale) in zip(figures_in(html), scales.items(), strict=True):
        [line] = figure["data"]
        assert (line["name"], line["x"]) == ("slo.tpot_s=0.05", [5, 20])
        assert line["y"] == pytest.approx([scale * each[key] for each in planned], rel=1e-5)
    assert "2 of 4 points" in html
    assert html.count("missed by") == 2


def test_keys_of_a_sweep() -> None:
    """Commas inside a value are no separators; too many points are refused."""
    table = '{ distribution = "uniform", low = 1, high = 2 }'
    swept = parse_key(f"workload.input_tokens=100,{table},200")
    assert swept.values == ("100", table, "200")
    many = parse_key("a=" + ",".join(map(str, range(50))))
    with pytest.raises(InputError, match=r"2,500 points"):
        points([many, replace(many, key="b")])
    with pytest.raises(InputError, match="close"):
        parse_key("a=[1,2")


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=30))
def test_front_is_what_no_other_point_beats(pairs: list[tuple[int, int]]) -> None:
    xs, ys = np.array(pairs).T
    expected = [
        not any((a <= x and b <= y) and (a < x or b < y) for a, b in pairs) for x, y in pairs
    ]
    assert front(xs, ys).tolist() == expected


def test_the_cost_of_a_design_is_gpus_watts_or_dollars_a_million_tokens() -> None:
    point = DesignPoint(
        label="", deployable=True, gpus=2, power_w=1400.0, price_usd_per_hour=5.0, ttft_s=1.0,
        tpot_s=0.1, output_tokens_per_s=700.0, tokens_per_s_per_gpu=350.0,
        tokens_per_s_per_user=10.0, meets_slo=True, configuration=None,  # type: ignore[arg-type]
    )  # fmt: skip
    for by, cost in (("gpus", 2), ("watts", 1400), ("usd", 1e6 * 5 / 3600 / 700)):
        assert fronts([point], by=by)[0].xs == pytest.approx([cost])
    with pytest.raises(InputError, match="--by usd"):
        fronts([point, replace(point, price_usd_per_hour=None)], by="usd")


def test_pareto(sizing: Sizing, tmp_path: Path) -> None:
    """Along the front more GPUs buy lower latency; each chart has the front and the others."""
    target = tmp_path / "pareto.html"
    done = sizing("pareto", SCENARIO, "--json", "--html", str(target))
    assert (done.code, done.err) == (0, "")
    rows = json.loads(done.out)
    figures = figures_in(target.read_text(encoding="utf-8"))
    names = ("cost against TTFT", "cost against TPOT", "throughput against pace")
    for drawn, name in zip(figures, names, strict=True):
        others, front = drawn["data"]
        kept = [each for each in rows if name in each["on_fronts"]]
        assert len(front["x"]) == len(kept)
        assert len(others["x"]) + len(kept) == len(rows) or len(others["x"]) > 500
    pairs = sorted((each["gpus"], each["ttft_s"]) for each in rows if names[0] in each["on_fronts"])
    assert len(pairs) > 1
    assert all(a[0] == b[0] or b[1] < a[1] for a, b in pairwise(pairs))
    front = figures[0]["data"][1]
    assert sorted(front["y"]) == [gpus for gpus, _ in pairs]
    assert front["x"] == pytest.approx(sorted(1000 * s for _, s in pairs), rel=1e-5)


def test_losses(plan: Plan) -> None:
    """The whole plan holds; a pool without a replica does not; placements shrink with it."""
    whole, *lost = losses(plan, requests=2000, seed=3)
    assert (whole.lost, whole.holds) == (None, True)
    assert [each.lost for each in lost] == [pool.role for pool in plan.pools]
    for pool, each in zip(plan.pools, lost, strict=True):
        assert each.replicas[pool.role] == pool.replicas - 1
        if pool.replicas == 1:
            assert each.holds is False
            assert f"the only {pool.role} replica" in each.misses[0]
        else:
            smaller = without_one(plan, pool.role).pool(pool.role)
            assert smaller.placement == pool.placement[: len(smaller.placement)]


@pytest.mark.parametrize(("spares", "code"), [(0, 3), (1, 0)])
def test_losses_command(
    sizing: Sizing, plan_of: Callable[..., Path], spares: int, code: int
) -> None:
    path = plan_of(SCENARIO, *SPLIT, "--set", f"search.spare_replicas={spares}")
    done = sizing("losses", str(path), "--requests", "1500", "--json")
    assert done.code == code
    whole, *lost = json.loads(done.out)
    assert whole["holds"] is True
    assert [each["lost"] for each in lost] == ["prefill", "decode"]
    assert all(each["holds"] for each in lost) is (code == 0)


@pytest.fixture(scope="module")
def page(plan: Plan) -> Page:
    """Return the plan's page."""
    return plan_page(plan)


def test_page_says_everything(plan: Plan, page: Page) -> None:
    """Answer, charts, layout with every GPU, assumptions, sources, what to type next."""
    html = render(page)
    assert f"{plan.cost.gpus} h100-sxm GPUs on" in page.headline
    assert [figure.title for figure in page.figures] == [
        "TTFT: distribution",
        "TPOT: distribution",
        "Queues over time",
        "Utilisation over time",
        "KV cache over time",
        "Pareto: cost against TTFT",
        "Pareto: cost against TPOT",
        "Pareto: throughput against pace",
    ]
    for words in ("Assumptions and errors", "price: yours", "serving up plan.json"):
        assert words in html, words
    for pool in plan.pools:
        assert html.count(f"{pool.role} replica ") == pool.gpus


def test_page_draws_the_plans_own_numbers(plan: Plan, page: Page) -> None:
    """Predicted percentiles, limits, the plan's place on the fronts and the fronts themselves."""
    for name, limit_s in (("ttft", plan.slo.ttft_s), ("tpot", plan.slo.tpot_s)):
        figure, predicted = page.figure(f"{name.upper()}: distribution"), plan.prediction
        shown = [1000 * getattr(predicted, name).at(p) for p in ("p50", "p90", "p95", "p99")]
        assert figure.trace("predicted")["x"] == pytest.approx(shown, rel=1e-5)
        assert limit_s is not None
        assert figure.trace("SLO")["x"][0] == pytest.approx(1000 * limit_s)
        assert figure.trace("SLO")["y"][1] == pytest.approx(1 - LEVELS[plan.slo.percentile])
        slowed = figure.trace("with slowed steps")["x"]
        assert slowed[len(slowed) // 2] >= figure.trace("simulated")["x"][len(slowed) // 2]
    front = page.figure("Pareto: cost against TTFT")
    cost = running(plan).usd_per_million_output_tokens
    ttft_s = plan.prediction.ttft.at(plan.slo.percentile)
    assert front.trace("the plan")["y"] == pytest.approx([cost], rel=1e-5)
    # Fronts are of short simulations, in which the plan is one of the configurations.
    assert front.trace("the plan")["x"] == pytest.approx([1000 * ttft_s], rel=0.05)
    kept = front.trace("no other beats it")
    [x], [y] = front.trace("the plan")["x"], front.trace("the plan")["y"]
    beside = zip(kept["x"], kept["y"], strict=True)
    assert any(ttft <= x * (1 + 1e-5) and cost <= y * (1 + 1e-5) for ttft, cost in beside)
    assert kept["x"] == sorted(kept["x"])
    assert kept["y"] == sorted(kept["y"], reverse=True)
    for role, row in {pool.role: pool for pool in plan.pools}.items():
        busy = page.figure("Utilisation over time").trace(role)["y"]
        assert 0 < np.mean(busy) <= 100, row


def test_questions_of_the_document_are_commands(sizing: Sizing) -> None:
    """Every command that docs/planning.md names is there, with the options it names."""
    text = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
    named = re.findall(r"(?:`|\$ )sizing ([a-z-]+)([^`\n]*)", text)
    assert {command for command, _ in named} >= {"plan", "compare", "sweep", "losses", "pareto"}
    for command, rest in named:
        shown = sizing(command, "-h")
        assert shown.code == 0, command
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in shown.out, (command, option)
