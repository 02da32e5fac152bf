"""capacity, split-map and decisions: inverse of plan, monotony, signs, a run of each command."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sizing
from minicluster.errors import InputError
from minicluster.pages.page import DataTable, Section
from minicluster.plan import Inputs
from sizing.catalog import with_keys
from sizing.cli.questions import parse_gpus
from sizing.planner.search import search
from sizing.planner.simulated_check import Found
from sizing.planner.studies.capacity import Capacity, capacity
from sizing.planner.studies.changes import (
    link_bytes_per_s,
    spine_oversubscription,
    with_lengths,
    with_links,
    with_prefix,
    with_spine,
)
from sizing.planner.studies.decisions import changes, decisions
from sizing.planner.studies.defaults import DECISIONS
from sizing.planner.studies.grid import Swept
from sizing.planner.studies.loss import as_confident
from sizing.planner.studies.split_map import LINKS, sign_confidence, split_map
from sizing.report.questions import decisions_sections
from sizing.scenario import Scenario
from tests.pages import figures_in
from tests.sizing.conftest import Sizing

SCENARIO = "llama-3.1-8b-h100"
GPUS = (1, 2, 4)


def inputs(*overrides: str) -> Inputs:
    """Return the shipped scenario with some keys changed."""
    return Scenario.load(SCENARIO, overrides)


# --- capacity


@pytest.fixture(scope="module")
def curve() -> Capacity:
    """Return the capacity of a few numbers of GPUs."""
    told: list[tuple[int, int]] = []
    found = capacity(inputs(), GPUS, think_s=5.0, progress=lambda *pair: told.append(pair))
    assert told == [(at, len(GPUS)) for at in range(1, len(GPUS) + 1)]
    return found


@pytest.mark.parametrize("gpus", [[], [0, 8], [8, 131_073]])
def test_numbers_of_gpus_that_no_cluster_has(gpus: list[int]) -> None:
    """There is no curve of no numbers, of none, and of more than the largest cluster."""
    with pytest.raises(InputError, match="whole numbers from 1 to 131,072"):
        capacity(inputs(), gpus)


def test_more_gpus_carry_more(curve: Capacity) -> None:
    """The rate never falls with the number of GPUs, and no layout has more than there are."""
    assert [each.gpus for each in curve.points] == list(GPUS)
    assert all(each.used_gpus <= each.gpus for each in curve.points)
    rates = [each.requests_per_s for each in curve.points]
    assert rates[0] > 0
    assert all(few <= many for few, many in pairwise(rates))


def test_users_follow_littles_law(curve: Capacity) -> None:
    """Users are in the system or think; tokens/s and joules are those of the rate."""
    for each in curve.points:
        assert each.prediction is not None
        assert each.running is not None
        stay_s = each.prediction.e2e.mean_s + curve.think_s
        assert each.users == pytest.approx(each.requests_per_s * stay_s)
        assert each.prediction.output_tokens_per_s == pytest.approx(300 * each.requests_per_s)
        assert each.running.joules_per_output_token == pytest.approx(
            700 * each.used_gpus / each.prediction.output_tokens_per_s
        )
        assert each.running.usd_per_hour is None


def test_the_rate_holds_as_a_plan_does(curve: Capacity) -> None:
    """At the found rate `sizing plan` needs no more GPUs, and the prediction keeps the SLO."""
    slo = inputs().scenario.slo
    for each in curve.points[1:]:
        assert each.prediction is not None
        for name, limit_s in slo.limits_s.items():
            assert getattr(each.prediction, name).at(slo.percentile) <= limit_s
        planned = search(inputs(f"workload.requests_per_s={each.requests_per_s}"))
        assert isinstance(planned, Found), planned
        assert planned.configuration.gpus <= each.gpus


def test_the_gpus_of_a_plan_carry_its_rate() -> None:
    """Capacity inverts a plan: its GPUs carry its rate again, up to what a search resolves."""
    asked = inputs("workload.requests_per_s=30")
    planned = search(asked)
    assert isinstance(planned, Found)
    (point,) = capacity(asked, [planned.configuration.gpus]).points
    assert point.requests_per_s > 0.9 * 30


def test_an_estimate_that_is_far_off_ends_no_curve() -> None:
    """Waits for adapters let each GPU carry a fifteenth of its estimate; twice the GPUs, twice."""
    lora = ("engine.max_loras=4", "engine.max_lora_rank=16", "workload.lora_adapters=20")
    two, four = capacity(inputs("search.pools=mixed", *lora), [2, 4]).points
    assert four.requests_per_s > 2 * two.requests_per_s > 0


def test_spares_take_gpus_from_the_load() -> None:
    """With a spare per pool as many GPUs carry less, and the spares are counted."""
    (with_spare,) = capacity(inputs("search.spare_replicas=1", "search.pools=mixed"), [4]).points
    (without,) = capacity(inputs("search.pools=mixed"), [4]).points
    assert 0 < with_spare.requests_per_s < without.requests_per_s
    assert with_spare.used_gpus <= 4


def test_reasons_where_nothing_holds() -> None:
    """Too few GPUs, and an SLO that no request meets, are said so."""
    large = Scenario.load("llama-3.1-70b-h100")
    (few,) = capacity(large, [1]).points
    assert (few.requests_per_s, few.users, few.used_gpus, few.max_num_seqs) == (0, 0, 0, 0)
    assert (few.layout, few.prediction, few.output_tokens_per_s) == ("", None, 0)
    assert "the smallest layout" in few.reason
    (never,) = capacity(inputs("slo.ttft_s=0.001"), [8]).points
    assert "without any load" in never.reason


def test_numbers_of_gpus() -> None:
    """A list, or doubles up to an end that counts too."""
    assert parse_gpus("8, 16,32") == [8, 16, 32]
    assert parse_gpus("8..64") == [8, 16, 32, 64]
    assert parse_gpus("3..10") == [3, 6, 10]
    assert parse_gpus("5..5") == [5]


def test_capacity_command(sizing: Sizing, tmp_path: Path) -> None:
    """JSON and the page say the same; a price gives dollars; a negative answer is exit code 3."""
    page = tmp_path / "capacity.html"
    priced = ("--set", "cluster.price_usd_per_gpu_hour=2")
    done = sizing("capacity", SCENARIO, "--gpus", "1,2", *priced, "--json", "--html", str(page))
    assert (done.code, done.err) == (0, "")
    points = json.loads(done.out)["points"]
    rates, users = figures_in(page.read_text(encoding="utf-8"))
    assert rates["data"][0]["x"] == [1, 2]
    assert rates["data"][0]["y"] == pytest.approx(
        [each["requests_per_s"] for each in points], rel=1e-5
    )
    assert users["data"][0]["y"] == pytest.approx([each["users"] for each in points], rel=1e-5)
    tokens_per_h = 3600 * points[0]["prediction"]["output_tokens_per_s"]
    assert points[0]["running"]["usd_per_million_output_tokens"] == pytest.approx(
        1e6 * 2 * points[0]["used_gpus"] / tokens_per_h
    )
    none = sizing("capacity", "llama-3.1-70b-h100", "--gpus", "1")
    assert none.code == 3
    assert "the smallest layout" in none.out


# --- split map


@given(
    one=st.floats(0.1, 1e4), other=st.floats(0.1, 1e4), variance=st.floats(0, 4, allow_nan=False)
)
def test_confidence_of_a_sign_is_symmetric(one: float, other: float, variance: float) -> None:
    """It is the same whichever is named first, a half where both are equal, and never less."""
    sure = sign_confidence(one, other, variance)
    assert sure == pytest.approx(sign_confidence(other, one, variance))
    assert 0.5 <= sure <= 1
    assert sign_confidence(one, one, variance) == 0.5


def test_a_faster_link_never_costs_split_pools_more() -> None:
    """Along the link aggregated pools stay as they are, and split ones need no more."""
    x = Swept(key="workload.requests_per_s", values=("40", "80"))
    y = Swept(key="link_bytes_per_s", values=("5e9", "50e9"))
    found = split_map(inputs(), x, y)
    assert [(each.x, each.y) for each in found.points] == [
        ("40", "5e9"), ("80", "5e9"), ("40", "50e9"), ("80", "50e9"),
    ]  # fmt: skip
    for slow, fast in zip(found.points[:2], found.points[2:], strict=True):
        assert slow.mixed_gpus == fast.mixed_gpus
        assert fast.split_gpus is not None
        assert slow.split_gpus is None or fast.split_gpus <= slow.split_gpus
        assert fast.saved_fraction is not None
        assert fast.confidence_fraction is not None


def test_a_value_twice_is_refused() -> None:
    twice = Swept(key="slo.ttft_s", values=("1", "1"))
    for x, y in ((twice, None), (None, twice)):
        with pytest.raises(InputError, match="each value once"):
            split_map(inputs(), x, y)


def test_changes_of_lengths_and_links() -> None:
    """Each function changes what it names, and nothing else."""
    given = inputs()
    longer = with_lengths(given, prompts=1.5, answers=0.5).scenario.workload
    assert (longer.input_tokens.mean, longer.output_tokens.mean) == (3000, 150)
    assert with_prefix(given, 0.25).scenario.workload.prefix_tokens == 500
    assert with_prefix(given, 1.0).scenario.workload.prefix_tokens == 1999
    link = link_bytes_per_s(given)
    assert link == pytest.approx(50e9)
    slower = with_links(given, 0.5)
    assert link_bytes_per_s(slower) == pytest.approx(25e9)
    assert slower.scenario == given.scenario
    assert with_keys(given, [], "test") == given


def test_the_spine_is_changed_where_there_is_one() -> None:
    """A cluster with tiers has the spine that its pools meet in; one domain has none."""
    zone = with_keys(inputs(), ["cluster.preset=roce-24k", "cluster.pools_meet_in=zone"], "test")
    assert spine_oversubscription(zone) == 7
    assert spine_oversubscription(with_spine(zone, 2.0)) == 2
    assert with_spine(zone, 2.0).scenario == zone.scenario
    named = {value for name, value, _ in changes(zone) if name == "spine"}
    assert named == {f"{ratio}:1 in place of 7:1" for ratio in (1, 2, 8, 32)}
    inside = with_keys(zone, ["cluster.pools_meet_in=hb", "cluster.max_gpus=8"], "test")
    assert spine_oversubscription(inside) is None


def test_split_map_command(sizing: Sizing, tmp_path: Path) -> None:
    """The page has the map's numbers, and the line where both kinds cost the same."""
    page = tmp_path / "map.html"
    axes = ("--x", "prompt_answer_ratio=1,8", "--y", "slo.ttft_s=0.5,1")
    done = sizing("split-map", SCENARIO, *axes, "--json", "--html", str(page))
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert len(found["points"]) == 4
    (drawn,) = figures_in(page.read_text(encoding="utf-8"))
    cells, line = drawn["data"]
    assert -1 < line["contours"]["start"] == line["contours"]["end"] < 0
    flat = [value for row in cells["z"] for value in row]
    known = [each["saved_fraction"] for each in found["points"]]
    assert [value for value, each in zip(flat, known, strict=True) if each is not None] == (
        pytest.approx([100 * each for each in known if each is not None], rel=1e-5)
    )


# --- decisions


def test_every_change_is_one() -> None:
    """Names are known, values differ from the scenario's own, and drafts only where it drafts."""
    given = inputs()
    found = list(changes(given))
    absent = {"accepted drafts", "spine", "class pools", "overlap"}
    assert {name for name, _, _ in found} == set(DECISIONS) - absent
    assert len({(name, value) for name, value, _ in found}) == len(found)
    for name, value, change in found:
        assert change() != given, (name, value)
    # Of prompts of 2,000 tokens without a prefix.
    hits = [value for name, value, _ in found if name == "prefix hits"]
    assert hits == ["500 tokens", "1,000 tokens"]


def test_decisions_are_sorted_by_gpus() -> None:
    """A looser promise needs no more, a spare needs more; a bad name is refused."""
    given = inputs("search.pools=mixed")
    found = decisions(given, only=["percentile", "spares"])
    gpus = [each.gpus for each in found.rows]
    assert all(each is not None for each in gpus)
    assert gpus == sorted(gpus, key=lambda each: each or 0)
    for each in found.rows:
        assert each.against_gpus is not None
        assert each.against_gpus <= 0 if each.name == "percentile" else each.against_gpus == 1
    for none in ("colour", "spine"):  # no such name, and a change that there is no room for
        with pytest.raises(InputError, match=f"--only.*{none}"):
            decisions(given, only=[none, "percentile"])


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("chat-and-summaries-8b", "class pools"), ("deepseek-v3-h200", "overlap")],
)
def test_changes_of_some_scenarios_only_have_names(scenario: str, name: str) -> None:
    given = Scenario.load(scenario)
    if name == "overlap":
        given = given.with_({"engine.all_to_all": "deepep"})
    assert name in DECISIONS
    assert {value.partition("=")[2] for each, value, _ in changes(given) if each == name} == (
        {"shared", "own"} if name == "class pools" else {"true"}
    )


def test_decisions_command(sizing: Sizing, tmp_path: Path) -> None:
    """JSON has the plan as given and one row per change; the page a bar each."""
    page = tmp_path / "decisions.html"
    options = ("--set", "search.pools=mixed", "--only", "rate")
    done = sizing("decisions", SCENARIO, *options, "--json", "--html", str(page))
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["base"]["feasible"] is True
    (drawn,) = figures_in(page.read_text(encoding="utf-8"))
    moved = [each["against_gpus"] for each in found["decisions"] if each["against_gpus"]]
    assert drawn["data"][0]["y"] == moved


def test_what_changes_nothing_is_a_line() -> None:
    """The rows are those that need more GPUs or fewer; the others are counted and named."""
    found = decisions(inputs(), only=("rate", "links", "router"))
    shown = list(decisions_sections(found))
    (rows,) = (block.rows for part in shown if isinstance(part, Section) for block in part.blocks
               if isinstance(block, DataTable))  # fmt: skip
    moved = [row for row in found.rows if row.against_gpus != 0]
    assert len(rows) == 1 + len(moved)
    said = "\n".join(str(part) for part in shown)
    assert f"{len(found.rows) - len(moved)} others: no change (" in said
    assert "GB/s" in said


def test_decisions_tell_how_many_are_done() -> None:
    """The scenario as given counts as one; the last word says that all are done."""
    told: list[tuple[int, int]] = []
    asked = inputs()
    found = decisions(asked, only=("links",), progress=lambda *pair: told.append(pair))
    total = 1 + len(found.rows)
    assert [done for done, _ in told] == [*range(1, total), total]
    assert {of for _, of in told} == {total}


def test_the_default_links_of_a_map_double() -> None:
    assert all(later == 2 * link for link, later in pairwise(LINKS))
    assert 1 in LINKS


def test_an_aggregated_plan_takes_as_long_as_its_confidence_allows_for() -> None:
    """Steps with prompts and without are slowed apart, as in the search that found it."""
    plan = sizing.plan(inputs("search.pools=mixed"))
    sure = plan.confidence
    assert sure is not None
    slow = as_confident(plan).step_model
    assert slow == plan.step_model.slowed(
        prefill=sure.prefill_factor, decode=sure.decode_factor, mixed=True
    )
    assert slow != plan.step_model.slowed(
        prefill=sure.prefill_factor, decode=sure.decode_factor, mixed=False
    )


def test_every_term_names_its_source() -> None:
    """Times of the engine come from its profile, all others from the GPU's op tables."""
    found = sizing.explain_plan(sizing.plan(inputs()))
    terms = [term for term in found.terms if "step" in term.of]
    named = {term.name.startswith("engine"): set[str]() for term in terms}
    for term in terms:
        named[term.name.startswith("engine")].add(term.source.split()[0])
    assert named[True] == {"engine"}
    assert "engine" not in named[False]
    assert not any(term.hidden_s for term in found.terms)


def test_a_named_decode_pool_has_the_batch_that_its_limit_allows() -> None:
    """A tight TPOT lets fewer sequences decode at once; where prompts are computed, it does not."""
    limits = {}
    for tpot_s in (0.012, 0.05):
        asked = inputs(f"slo.tpot_s={tpot_s}", "workload.requests_per_s=5")
        for pools in ({"prefill": "1xTP1", "decode": "1xTP1"}, {"mixed": "1xTP1"}):
            found = sizing.predict(asked, **pools).pools[-1]
            limits[found.role, tpot_s] = found.max_num_seqs
    assert limits["decode", 0.012] < limits["decode", 0.05]
    assert limits["mixed", 0.012] == limits["mixed", 0.05]
