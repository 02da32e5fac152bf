"""Simulated engines under the real cluster: Ray Serve, the endpoint, replicas that fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.serving.deployed import Split

from .conftest import RATE, SLOWDOWN, answer_limits
from .rounds import HEAD, AnswerLimits, Offered, Round, RoundOutcome, all_rounds, play, total_row

pytestmark = pytest.mark.simulated

OVERLOAD = 3.0
"""Times the plan's rate."""

SEED = 19


@pytest.fixture(scope="module")
def limits(moe_model: Path) -> AnswerLimits:
    return answer_limits(moe_model)


@pytest.mark.parametrize(
    ("rounds", "requests"),
    [
        pytest.param([Round(role="prefill", fault="exit", victims=2)], 36, id="one"),
        pytest.param(all_rounds(SEED), 60, id="twenty", marks=pytest.mark.campaign),
    ],
)
def test_faults_under_overload_leave_no_request_and_no_block(
    cluster: Split,
    limits: AnswerLimits,
    rounds: list[Round],
    requests: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """
    Replicas of both roles die, stand still, slow down or lose KV caches at three times the load.

    Every request gets its whole answer, a refusal that says when to ask again, or, once its stream
    has begun, an error event, each within its limits. Afterwards nothing is in flight or held, and
    what died has been replaced.
    """
    load = Offered(requests=requests, requests_per_s=OVERLOAD * RATE / SLOWDOWN)
    cluster.wait_until_whole()
    outcomes: list[RoundOutcome] = []
    with capsys.disabled():
        sys.stdout.write(f"\n{HEAD}\n")
        for number, played in enumerate(rounds, 1):
            outcomes.append(play(cluster, played, load, limits, SEED + number))
            lines = [outcomes[-1].row(number, SLOWDOWN), *outcomes[-1].wrong]
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()
        sys.stdout.write(total_row(outcomes, SLOWDOWN) + "\n")
    assert [(each.played, each.wrong) for each in outcomes if each.wrong] == []
    total = sum(each.requests for each in outcomes)
    assert total == len(rounds) * requests
    assert sum(each.answered for each in outcomes) > total / 4
    assert any(each.refused for each in outcomes), "no overload"
    broke = [each for each in outcomes if each.played.fault == "lose-streams"]
    assert all(each.broken for each in broke), "no stream was lost"
