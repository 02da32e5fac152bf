"""The client's own error, and whether it is fit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from loadtest.run.client_health import health, merged
from loadtest.selftest import selftest
from loadtest.selftest.selftest import Level, Truth, client_error, parse_streams
from minicluster.errors import Exit, InputError
from minicluster.specs.slo import SloSpec
from tests.loadtest.command import loadtest
from tests.loadtest.made import CLIENT, make_run, make_sample


def test_selftest_prints_the_client_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The selftest loads the bundled server and prints the client's own error at each load."""
    monkeypatch.setattr(selftest, "WARMUP_S", 0.2)
    monkeypatch.setattr(selftest, "MIN_REQUESTS", 5)
    streams = ("--streams", "10,5@0.01", "--seconds", "1")
    done = loadtest("selftest", *streams, "--no-capacity", "--json")
    errors = json.loads(done.stdout)["errors"]

    assert done.returncode in {Exit.DONE, Exit.INCONCLUSIVE}, done.stderr
    assert [(e["streams"], e["itl_s"]) for e in errors] == [(10, 0.02), (5, 0.01)]
    assert all(e["num_requests"] > 0 for e in errors)
    assert all(e["ttft_error_p50_s"] >= 0 for e in errors)


def test_the_error_is_what_the_client_saw_less_what_the_server_did() -> None:
    """3 ms of TTFT too many, 1 ms of each gap: by the difference of either side's own stamps."""
    run = make_run([make_sample(k, k / 10, ttft_s=0.053, itl_s=0.021) for k in range(20)])
    sent = tuple(100.05 + 0.02 * k for k in range(10))
    truth = {k: Truth(received_s=100.0, chunk_s=sent) for k in range(20)}
    error = client_error(run, truth, Level(streams=1))

    assert error.num_requests == 20
    assert (error.ttft_error_p50_s, error.ttft_error_p99_s) == pytest.approx((0.003, 0.003))
    assert (error.itl_error_p99_s, error.tpot_error_p99_s) == pytest.approx((0.001, 0.001))


def test_streams_are_read() -> None:
    """By Little's law the rate times a request's time is the number of streams."""
    one, other = parse_streams("1,30@0.04")

    assert (one.streams, one.itl_s, other.streams, other.itl_s) == (1, 0.02, 30, 0.04)
    assert other.requests_per_s * (0.2 + 49 * 0.04) == pytest.approx(30)
    for text in ("", "0", "1,x", "5@0", "5@x", "5@nan"):
        with pytest.raises(InputError, match="--streams"):
            parse_streams(text)


PATIENT = SloSpec(ttft_s=100.0, tpot_s=100.0)


@pytest.mark.parametrize(
    ("changes", "lag_s", "slo", "problem"),
    [
        ({}, 0.0, PATIENT, None),
        ({"cpu_fraction": 0.9}, 0.0, PATIENT, "saturated: it used 90% of its core"),
        ({"heartbeat_lag_s": (0.001,) * 80 + (0.011,) * 20}, 0.0, PATIENT, "p90 lateness"),
        ({"stalled_s": 4.0}, 0.0, PATIENT, "stalled for 4.0 of 10 s (limit 1%): suspended, or"),
        ({"stalled_s": 0.09}, 0.0, PATIENT, None),
        # 3 ms late at most, twice, over 9 tokens: 0.67 ms, more than 5 % of 10 ms, not of 15 ms.
        ({"heartbeat_lag_s": (0.003,) * 100}, 0.0, replace(PATIENT, tpot_s=0.010), "0.7 ms of a T"),
        ({"heartbeat_lag_s": (0.003,) * 100}, 0.0, replace(PATIENT, tpot_s=0.015), None),
        ({"heartbeat_lag_s": (0.003,) * 100}, 0.0, replace(PATIENT, itl_s=0.05), "3.0 ms of a ITL"),
        ({}, 0.2, SloSpec(ttft_s=1.0), "201.0 ms of a TTFT"),
        ({}, 0.2, SloSpec(ttft_s=10.0), None),
    ],
)
def test_a_client_that_could_not_keep_up_is_not_fit(
    changes: dict[str, Any], lag_s: float, slo: SloSpec, problem: str | None
) -> None:
    """Its own lag is compared with the limits; a saturated or stalled client is never fit."""
    samples = tuple(make_sample(k, due_s=float(k), lag_s=lag_s) for k in range(5))
    own = health(replace(CLIENT, **changes), samples, slo)

    assert len(own.problems) == bool(problem)
    assert not problem or problem in own.problems[0]
    assert own.saturated == ("cpu_fraction" in changes or "p90" in (problem or ""))


def test_of_several_processes_the_worst_counts() -> None:
    busy = replace(CLIENT, cpu_fraction=0.7, heartbeat_lag_s=(0.02,) * 100, stop="died")
    both = merged((CLIENT, replace(busy, stalled_s=4.0)))

    assert (both.cpu_fraction, both.stop, both.processes) == (0.7, "died", 2)
    assert (both.connections, both.stalled_s) == (6, 4.0)
    assert both.heartbeat_lag_s == (0.001,) * 100 + (0.02,) * 100
    for first, second, stamps in (
        ("kernel", "reader", "reader"),
        ("kernel", "", "kernel"),
        ("reader", "", "reader"),
    ):
        clients = replace(CLIENT, stamps=first), replace(CLIENT, stamps=second)
        assert merged(clients).stamps == merged(clients[::-1]).stamps == stamps
