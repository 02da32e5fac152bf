"""Simulated engines under the real cluster: Ray Serve, the endpoint, replicas that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from loadtest.client.endpoint import served_models
from serving.simulated.request import answer_ids, prompt_seed
from tests.serving.deployed import Split
from tests.serving.faults.load import body_of, under_way

from .conftest import RATE, SLOWDOWN, answer_limits
from .rounds import HEAD, AnswerLimits, Offered, Round, RoundOutcome, all_rounds, play, total_row

pytestmark = pytest.mark.simulated

OVERLOAD = 3.0
"""Times the plan's rate."""

SEED = 19


@pytest.fixture(scope="module")
def limits(small_model: Path) -> AnswerLimits:
    return answer_limits(small_model)


def test_answers_follow_from_prompts_and_say_that_they_are_simulated(
    cluster: Split, limits: AnswerLimits
) -> None:
    bodies = [body_of(seed, tokens=50 + seed, max_tokens=12) for seed in range(20)]
    with under_way(cluster.base_url, bodies) as waiting:
        pass
    for body, future in zip(bodies, waiting, strict=True):
        reply = future.result()
        assert reply.done, reply
        assert reply.path == "remote"
        assert reply.headers["x-minicluster-engine"].startswith("simulated; slowdown=2; ")
        chunks = [json.loads(each) for each in reply.events if each != "[DONE]"]
        text = "".join(each["choices"][0]["text"] for each in chunks)
        ids = answer_ids(prompt_seed(body["prompt"]), 12, limits.vocab_size)
        assert text.split() == [str(each) for each in ids]
    assert served_models(cluster.base_url)[1] == SLOWDOWN


@pytest.mark.parametrize(
    ("rounds", "requests"),
    [
        pytest.param(
            [
                Round(role="prefill", fault="exit", victims=2),
                Round(role="decode", fault="die", victims=1),
            ],
            36,
            id="two",
        ),
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
