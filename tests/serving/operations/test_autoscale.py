"""`serving scale --auto`: up at once, down after the hold time, no flapping, a clean end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from minicluster.plan import Plan
from minicluster.plan.scaling import held_intervals, scaled_pools
from serving.cli import scale as cli
from serving.deployment.engine_args import SIMULATED
from serving.operations.autoscale import Samples, follow, offered_per_s, read_histograms
from tests.serving.command import serving_here
from tests.serving.plans import deployed, make_pool, places

WINDOW_S = 60.0
HOLD_S = 300.0


@pytest.fixture
def four(plan: Plan) -> Plan:
    """Return a plan of four replicas of each role for 1 request/s."""
    pools = tuple(
        make_pool(role, replicas=4, placement=places((role, (0, 1, 2, 3))))
        for role in ("prefill", "decode")
    )
    return replace(plan, pools=pools)


def decided(plan: Plan, rates: list[float], changes: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return the replicas after each of some rates, by the clock of the test alone."""
    left = iter(rates)
    now = {pool.role: pool.replicas for pool in plan.pools}
    held = held_intervals(HOLD_S, WINDOW_S)
    found = follow(scaled_pools(plan), now, left.__next__, changes.append, held=held)
    return [each.replicas for each in islice(found, len(rates))]


def test_a_day_goes_down_and_up_without_flapping(four: Plan) -> None:
    """From the plan to one replica each and back; noise within the hold time changes nothing."""
    night, noise, morning = [0.05] * 10, [0.05, 0.3] * 10, [0.3, 0.6, 1.0, 1.0]
    changes: list[dict[str, int]] = []
    found = decided(four, [*night, *noise, *morning], changes)
    assert found[0] == {"prefill": 4, "decode": 4}
    assert found[4] == found[0]  # the hold time is not over
    assert found[len(night) - 1] == {"prefill": 1, "decode": 1}
    assert len({tuple(each.values()) for each in found[11 : len(night) + len(noise)]}) == 1
    assert found[-1] == found[-2] == {"prefill": 4, "decode": 4}
    assert changes == [two for one, two in pairwise([found[0], *found]) if one != two]


def _text(answered: int, shed: int) -> str:
    registry = CollectorRegistry()
    for name in ("ttft", "tpot", "prefill_queue"):
        histogram = Histogram(f"minicluster_{name}_seconds", name, registry=registry)
        for _ in range(answered):
            histogram.observe(0.1)
    counter = Counter("minicluster_shed", "Not admitted.", ["reason"], registry=registry)
    counter.labels("ttft").inc(shed)
    return generate_latest(registry).decode()


def test_requests_that_are_refused_count_too() -> None:
    """Else one replica, which admits no more than it can, would look like enough for ever."""
    before, after = (read_histograms(_text(*each)) for each in ((5, 1), (25, 11)))
    assert offered_per_s(before, after, 10.0) == 3.0
    assert offered_per_s(after, before, 6.0) == 1.0  # the endpoint began anew


@pytest.fixture
def scaled(
    four: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[int]], list[dict[str, int]]]:
    """Return a function that has so many requests come in each window, then Ctrl-C."""
    monkeypatch.chdir(tmp_path)
    state = deployed(four, target=SIMULATED, slowdown=2.0)
    changes: list[dict[str, int]] = []
    clock = [0.0]

    def run(requests: list[int]) -> list[dict[str, int]]:
        totals = [sum(requests[:at]) for at in range(len(requests) + 1)]
        scrapes = [read_histograms(_text(total, 0)) for total in totals]

        def scrape(*_: str) -> Samples:
            if not scrapes:
                raise KeyboardInterrupt
            return scrapes.pop(0)

        def sleep(seconds: float) -> None:
            clock[0] += seconds

        monkeypatch.setattr("serving.operations.status.current", lambda: state)
        monkeypatch.setattr("serving.operations.autoscale.scrape", scrape)
        monkeypatch.setattr(cli.time, "sleep", sleep)
        monkeypatch.setattr(cli.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(
            "serving.operations.scale.scale", lambda _state, to, _report: changes.append(to)
        )
        return changes

    return run


def test_the_command_follows_until_ctrl_c(
    scaled: Callable[[list[int]], list[dict[str, int]]], tmp_path: Path
) -> None:
    """Rates of slower engines are compared with the plan's in their seconds; the end is clean."""
    changes = scaled([0, 0, 0, 30])  # 0.5 requests/s are the planned rate at slowdown 2
    done = serving_here(tmp_path, "scale", "--auto", "--window", "60", "--hold-seconds", "120")
    assert done.returncode == 0, done.stderr
    assert changes == [{"prefill": 1, "decode": 1}, {"prefill": 4, "decode": 4}]
    assert done.stdout.splitlines() == [
        "0 requests/s; replicas: prefill 4, decode 4",
        "0 requests/s; replicas: prefill 4, decode 4",
        "0 requests/s; replicas: prefill 1, decode 1",
        "0.5 requests/s; replicas: prefill 4, decode 4",
        "stopped; the replicas stay as they are",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--decode", "2"), "--auto without them"),
        (("--margin", "-1"), "--margin is -1.0; it has to be a finite number, zero or more"),
        (("--hold-seconds", "-1"), "--hold-seconds is -1.0"),
    ],
)
def test_options_that_cannot_be(
    scaled: Callable[[list[int]], list[dict[str, int]]],
    tmp_path: Path,
    options: tuple[str, str],
    says: str,
) -> None:
    """They are exit code 2, and nothing changes."""
    changes = scaled([])
    done = serving_here(tmp_path, "scale", "--auto", *options)
    assert done.returncode == 2
    assert says in done.stderr
    assert not changes
