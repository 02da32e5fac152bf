"""Users in place of a rate, as keys of a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from sizing.scenario import Scenario

if TYPE_CHECKING:
    from pathlib import Path

USERS = {"workload.users": 300, "workload.think_s": 8.0}
MIX = """
[model]
id = "llama-3.1-8b"
[cluster]
preset = "h100-8"
[[workload.classes]]
name = "chat"
users = 300
think_s = 8
input_tokens = 1000
output_tokens = 200
slo = { e2e_s = 4 }
[[workload.classes]]
name = "summaries"
requests_per_s = 4
input_tokens = 8000
output_tokens = { distribution = "uniform", low = 10, high = 400 }
"""


@pytest.fixture
def mix(tmp_path: Path) -> Scenario:
    (tmp_path / "mix.toml").write_text(MIX, encoding="utf-8")
    return Scenario.load(tmp_path / "mix.toml")


@given(st.integers(1, 10_000), st.floats(0, 1000), st.floats(0.1, 9), st.floats(0.001, 0.9))
def test_first_rate_is_that_of_answers_as_late_as_the_limits_allow(
    users: int, think_s: float, ttft_s: float, tpot_s: float
) -> None:
    asked = Scenario.load(
        "llama-3.1-8b-h100",
        {
            "workload.users": users,
            "workload.think_s": think_s,
            "slo.ttft_s": ttft_s,
            "slo.tpot_s": tpot_s,
            "workload.output_tokens": 101,
        },
    )
    load = asked.scenario.workload
    assert load.has_users
    assert load.requests_per_s == pytest.approx(users / (ttft_s + 100 * tpot_s + think_s))
    assert asked.with_({"slo.e2e_s": 0.2}).scenario.workload.requests_per_s == pytest.approx(
        users / (min(0.2, ttft_s + 100 * tpot_s) + think_s)
    )


def test_a_scenario_of_users_is_written_without_its_rate(mix: Scenario, tmp_path: Path) -> None:
    for asked in (mix, Scenario.load("llama-3.1-8b-h100", USERS)):
        (tmp_path / "again.toml").write_text(asked.to_toml(), encoding="utf-8")
        assert Scenario.load(tmp_path / "again.toml") == asked
        assert asked.with_({"search.pools": "any"}) == asked
        assert "workload.requests_per_s" not in asked.set_keys()
    first, second = mix.set_keys()["workload.classes"]
    assert (first["users"], first["think_s"], first.get("requests_per_s")) == (300, 8.0, None)
    assert (second["requests_per_s"], second.get("users"), second.get("think_s")) == (
        4.0,
        None,
        None,
    )


def test_a_classs_users_have_its_own_limits(mix: Scenario) -> None:
    load = mix.scenario.workload
    assert [each.requests_per_s for each in load.classes] == [pytest.approx(300 / 12), 4]
    assert load.requests_per_s == pytest.approx(29)
    assert [each.users for each in load.apart] == [300, None]
    fixed = load.at_rate(58)
    assert not fixed.has_users
    assert [each.requests_per_s for each in fixed.classes] == [pytest.approx(50), pytest.approx(8)]
    moved = load.with_rates({"chat": 30.0})
    assert (moved.has_users, moved.requests_per_s) == (True, 34)


def test_rate_and_users_take_each_others_place(mix: Scenario) -> None:
    rate = Scenario.load("llama-3.1-8b-h100", {"workload.requests_per_s": 7.0})
    users = rate.with_(USERS)
    assert users.scenario.workload.users == 300
    assert users.with_({"workload.requests_per_s": 7.0}) == rate
    load = mix.with_({"workload.classes.chat.requests_per_s": 5.0}).scenario.workload
    assert (load.has_users, load.requests_per_s) == (False, 9)
    load = mix.with_({"workload.classes.summaries.users": 50}).scenario.workload
    assert [each.users for each in load.classes] == [300, 50]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({**USERS, "workload.requests_per_s": 3.0}, ["requests_per_s is 3.0", "beside users"]),
        ({"workload.users": 0}, ["workload.users is 0", "positive"]),
        ({"workload.users": -1}, ["workload.users", "positive"]),
        ({"workload.users": True}, ["workload.users", "a whole number"]),
        ({"workload.users": 2.5}, ["workload.users", "a whole number"]),
        ({"workload.users": 10**8}, ["workload.users", "10,000,000"]),
        ({"workload.users": "many"}, ["workload.users", "a whole number"]),
        ({"workload.users": 3, "workload.think_s": -1}, ["workload.think_s", "zero or more"]),
        ({"workload.users": 3, "workload.think_s": 1e6}, ["workload.think_s", "86,400"]),
        ({"workload.users": 3, "workload.think_s": "long"}, ["workload.think_s", "number"]),
        ({"workload.users": 3, "workload.output_tokens": None}, ["output_tokens", "a value"]),
        ({"workload.users": 3, "slo.ttft_s": -1}, ["slo.ttft_s", "positive"]),
        ({"workload.think_s": 3.0}, ["workload.think_s", "without users"]),
        ({"workload.users": None, "workload.requests_per_s": None}, ["requests_per_s", "a value"]),
    ],
)
def test_bad_users_are_refused_by_place(overrides: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(InputError) as found:
        Scenario.load("llama-3.1-8b-h100", overrides)
    assert all(text in str(found.value) for text in says), found.value


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"workload.requests_per_s": 5.0}, ["workload.requests_per_s", "some have users"]),
        ({"workload.users": 5}, ["workload.users", "beside classes"]),
        ({"workload.think_s": 5.0}, ["workload.think_s", "beside classes"]),
        ({"workload.classes.summaries.think_s": 5.0}, ["classes[summaries].think_s", "users"]),
        (
            {"workload.classes.chat.users": 5, "workload.classes.chat.requests_per_s": 5.0},
            ["workload.classes.0.requests_per_s", "beside users"],
        ),
    ],
)
def test_bad_users_of_classes_are_refused_by_place(
    mix: Scenario, overrides: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(InputError) as found:
        mix.with_(overrides)
    assert all(text in str(found.value) for text in says), found.value
