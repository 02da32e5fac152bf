"""Simulated engines under the real cluster: Ray Serve, the endpoint, replicas that fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.client.endpoint import served_models
from minicluster.engine_model.kv_cache import kv_bytes_per_token
from minicluster.plan import Plan, StepModel
from minicluster.specs.slo import SloSpec
from minicluster.specs.step import Interference
from minicluster.specs.workload import Lengths, WorkloadSpec
from serving.simulated.request import answer_ids, prompt_seed
from tests.plans import PATH, STEP
from tests.serving.command import serving
from tests.serving.deployed import Shared, Split, driven
from tests.serving.faults.load import DEADLINE_S, body_of, under_way
from tests.serving.plans import make_deployment, make_plan, make_pool, places

from .rounds import HEAD, AnswerLimits, Offered, Round, RoundOutcome, all_rounds, play, total_row

pytestmark = pytest.mark.engine

SLOWDOWN = 2.0
REPLICAS = 3
"""Of each role."""

RATE = 5.0
"""Requests per second of the plan; prefill computes about 8."""

SLO = SloSpec(ttft_s=DEADLINE_S / SLOWDOWN / 2, tpot_s=0.1)

OVERLOAD = 3.0
"""Times the plan's rate."""

BUSY_S = 5.0
"""What a request may take beyond its limits: the endpoint's 2 s, and a machine of two cores."""

SEED = 19


def plan_for_gpus(model: Path) -> Plan:
    """Return a plan of three replicas of each role, with little KV cache."""
    nodes = [f"node-{at}" for at in range(2 * REPLICAS)]
    prefill, decode = (
        make_pool(
            role,
            gpu="h100-sxm",
            tp=2,
            replicas=REPLICAS,
            max_num_seqs=8,
            placement=places(*((node, (0, 1)) for node in of)),
        )
        for role, of in (("prefill", nodes[:REPLICAS]), ("decode", nodes[REPLICAS:]))
    )
    made = make_deployment(model, prefill=prefill, decode=decode)
    blocks_bytes = 32 * kv_bytes_per_token(made.model, tp=2) * 400
    made = replace(made, pools=tuple(replace(each, kv_bytes=blocks_bytes) for each in made.pools))
    step = replace(
        STEP, base_s=0.04, per_prefill_token_s=6e-4, per_sequence_s=1e-3, max_tokens=2048
    )
    path = replace(PATH, transfer_base_s=1e-2, transfer_per_token_s=4e-5)
    load = WorkloadSpec(
        requests_per_s=RATE,
        input_tokens=Lengths(distribution="uniform", low=50, high=900),
        output_tokens=Lengths(distribution="uniform", low=1, high=24),
    )
    return replace(
        make_plan(made).under(slo=SLO, workload=load),
        step_model=StepModel(prefill=step, decode=step, path=path, interference=Interference()),
    )


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, small_model: Path, shared: Shared
) -> Iterator[Split]:
    """Return three prefill and three decode replicas of a plan for GPUs."""
    shared.end()
    place = tmp_path_factory.mktemp("simulated")
    options = ("--engine", "simulated", "--slowdown", str(SLOWDOWN))
    with driven(place, plan_for_gpus(small_model), DEADLINE_S, *options) as found:
        yield found


@pytest.fixture(scope="module")
def limits(small_model: Path) -> AnswerLimits:
    """Return both deadlines, and what a token may take, of the clock."""
    assert SLO.per_token_s is not None
    return AnswerLimits(
        first_s=2 * DEADLINE_S + BUSY_S,
        token_s=10 * SLO.per_token_s * SLOWDOWN,  # as docs/operations.md says: `answer-timeout`
        vocab_size=json.loads((small_model / "config.json").read_text())["vocab_size"],
    )


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
    assert served_models(cluster.base_url).slowdown == SLOWDOWN


def test_a_plan_for_gpus_is_deployed_as_planned(cluster: Split) -> None:
    done = serving(cluster.place, "verify", "--json")
    assert json.loads(done.stdout)["differences"] == []
    assert f"prefill  {REPLICAS} of {REPLICAS} replicas, healthy" in (
        said := serving(cluster.place, "status").stdout
    )
    assert "simulated, 2 times slower" in said


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
