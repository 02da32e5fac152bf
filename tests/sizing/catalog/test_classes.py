"""Classes of requests in a scenario: rates that add up, limits of their own, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.specs.slo import SloSpec, loosest, strictest
from sizing import catalog
from sizing.catalog.scenario import scenario_from
from sizing.scenario import Scenario

MIX = """
[model]
id = "llama-3.1-8b"
[cluster]
preset = "h100-8"
max_gpus = 16
[slo]
ttft_s = 0.5
e2e_s = 30
[[workload.classes]]
name = "chat"
requests_per_s = 4
input_tokens = 500
output_tokens = { distribution = "uniform", low = 10, high = 20 }
[[workload.classes]]
name = "summaries"
requests_per_s = 1
input_tokens = 8000
output_tokens = 200
prefix_tokens = 64
[workload.classes.slo]
ttft_s = 3.0
percentile = "p95"
"""
MARGIN = "workload.classes"


@pytest.fixture
def mix(tmp_path: Path) -> Scenario:
    (tmp_path / "mix.toml").write_text(MIX, encoding="utf-8")
    return Scenario.load(tmp_path / "mix.toml")


def test_a_class_has_the_scenarios_limits_but_for_its_own(mix: Scenario) -> None:
    chat, summaries = mix.scenario.promises.values()
    assert chat == mix.scenario.slo
    assert (summaries.ttft_s, summaries.percentile) == (3.0, "p95")
    assert (summaries.tpot_s, summaries.e2e_s) == (chat.tpot_s, 30)


def test_rates_add_up_and_scale_together(mix: Scenario) -> None:
    """The whole rate is their sum; set, it scales them; a class's own changes the sum."""
    rates = [each.requests_per_s for each in mix.scenario.workload.classes]
    assert mix.scenario.workload.requests_per_s == sum(rates) == 5
    twice = mix.with_({"workload.requests_per_s": 10}).scenario.workload
    assert [each.requests_per_s for each in twice.classes] == [8, 2]
    assert twice == mix.scenario.workload.at_rate(10)
    more = mix.with_({f"{MARGIN}.chat.requests_per_s": 9}).scenario.workload
    assert more.requests_per_s == 10


def test_a_written_mix_reads_back(mix: Scenario, tmp_path: Path) -> None:
    (tmp_path / "again.toml").write_text(mix.to_toml(), encoding="utf-8")
    assert Scenario.load(tmp_path / "again.toml") == mix
    assert "[[workload.classes]]" in mix.to_toml()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({f"{MARGIN}.chat.name": "summaries"}, ["classes.1.name", "twice", "rename"]),
        ({f"{MARGIN}.chat.name": "Chat/1"}, ["classes.0.name", "'Chat/1'", "lower-case"]),
        ({f"{MARGIN}.chat.requests_per_s": None}, ["classes.0.requests_per_s", "a value"]),
        ({f"{MARGIN}.chat.requests_per_s": 0}, ["classes[chat].requests_per_s", "positive"]),
        ({f"{MARGIN}.chat.requests_per_s": 0.01}, ["classes[chat]", "2%", "leave the class out"]),
        ({f"{MARGIN}.chat.input_tokens": "many"}, ["classes.0.input_tokens", "whole number"]),
        ({f"{MARGIN}.chat.output_tokens": None}, ["classes[chat].output_tokens", "a value"]),
        ({f"{MARGIN}.chat.prefix_tokens": 500}, ["classes[chat].prefix_tokens", "less than"]),
        ({f"{MARGIN}.chat.people": 3}, ["classes.0.people", "no such key", "sizing schema"]),
        ({f"{MARGIN}.chat.input_token": 3}, ["classes.0.", "mean workload.classes.input_tokens?"]),
        ({f"{MARGIN}.absent.users": 3}, ["classes.absent", "absent is not a table"]),
        ({f"{MARGIN}.requests_per_s": 3}, ["workload.classes is not a table"]),
        ({f"{MARGIN}.chat.slo.ttft_s": -1}, ["classes.0.slo: ttft_s", "positive"]),
        ({f"{MARGIN}.chat.slo.e2e_s": 1e6}, ["classes[chat].slo.e2e_s", "36,000"]),
        ({f"{MARGIN}.chat.slo.percentile": "p9"}, ["slo.percentile", "p99"]),
        ({f"{MARGIN}.chat.input_tokens": 10**6}, ["classes[chat].input_tokens", "context"]),
        ({MARGIN: 3}, [MARGIN, "[[workload.classes]]"]),
        ({MARGIN: []}, ["workload.input_tokens", "[[workload.classes]]"]),
        ({"workload.input_tokens": 3}, ["workload.input_tokens", "beside classes"]),
        ({"workload.trace": "log.csv"}, ["workload.trace", "beside classes"]),
        ({"slo.e2e_s": 0}, ["slo.e2e_s", "positive"]),
    ],
)
def test_bad_classes_are_refused_by_place(
    mix: Scenario, overrides: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(InputError) as found:
        mix.with_(overrides)
    assert all(text in str(found.value) for text in says), found.value


def test_a_rate_beside_classes_has_to_be_their_sum() -> None:
    raw = {
        "model": {"id": "llama-3.1-8b"},
        "cluster": {"preset": "h100-8"},
        "workload": {
            "requests_per_s": 3.0,
            "classes": [
                {"name": "a", "requests_per_s": 1.0, "input_tokens": 9, "output_tokens": 9}
            ],
        },
    }
    with pytest.raises(InputError, match=r"requests_per_s is 3.0; it has to be 1.*leave it out"):
        scenario_from(raw, place="s")


def test_pools_for_classes_need_classes() -> None:
    with pytest.raises(InputError, match=r"search\.class_pools"):
        catalog.read_scenario("llama-3.1-8b-h100", ["search.class_pools=own"])


LIMITS = st.none() | st.floats(0.01, 100)
SLOS = st.builds(
    SloSpec,
    ttft_s=st.floats(0.01, 100),
    tpot_s=LIMITS,
    itl_s=LIMITS,
    e2e_s=LIMITS,
    percentile=st.sampled_from(["p50", "p95", "p99"]),
)


@given(st.lists(SLOS, min_size=1, max_size=4))
def test_every_limit_lies_between_the_strictest_and_the_loosest(slos: list[SloSpec]) -> None:
    low, high = strictest(slos), loosest(slos)
    assert low in slos or len(slos) > 1
    for slo in slos:
        assert low.level >= slo.level >= high.level
        for metric, limit_s in slo.limits_s.items():
            assert low.limits_s[metric] <= limit_s
            assert limit_s <= high.limits_s.get(metric, limit_s)
