"""The deployment of simulated engines that tests share: prefill replicas, groups of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minicluster.engine_model.kv_cache import kv_bytes_per_token
from minicluster.plan import Plan, StepModel
from minicluster.specs.slo import SloSpec
from minicluster.specs.step import Interference
from minicluster.specs.workload import Lengths, WorkloadSpec
from tests.plans import PATH, STEP
from tests.serving.deployed import Split, driven
from tests.serving.faults.load import DEADLINE_S
from tests.serving.plans import make_deployment, make_plan, make_pool, places

from .rounds import AnswerLimits

SLOWDOWN = 2.0
REPLICAS = 3
"""Of prefill."""

GROUPS, RANKS = 2, 2
"""Of decode: ranks of a group are in one process."""

RATE = 5.0
"""Requests per second of the plan; prefill computes about 8."""

SLO = SloSpec(ttft_s=DEADLINE_S / SLOWDOWN / 2, tpot_s=0.1)


BUSY_S = 5.0
"""What a request may take beyond its limits: the endpoint's 2 s, and a machine of two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the test that ends the shared deployment after those that use it."""
    items.sort(key=lambda item: "ending" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, moe_model: Path) -> Iterator[Split]:
    """Return three prefill replicas and two groups of two decode ranks of a plan for GPUs."""
    place = tmp_path_factory.mktemp("simulated")
    options = ("--engine", "simulated", "--slowdown", str(SLOWDOWN))
    with driven(place, grouped(moe_model), DEADLINE_S, *options) as found:
        yield found


@pytest.fixture
def ending(cluster: Split) -> Split:
    """Return the shared deployment for the test that ends it."""
    cluster.wait_until_whole()
    return cluster


def grouped(model: Path) -> Plan:
    """Return a plan of groups of ranks for decode."""
    plan = plan_for_gpus(model)
    prefill, decode = plan.pools
    placement = places(*((f"group-{at}", (0, 1, 2, 3)) for at in range(GROUPS)))
    ranks = replace(decode, replicas=GROUPS, dp=RANKS, ep=4, placement=placement)
    return replace(plan, pools=(prefill, ranks))


def answer_limits(model: Path) -> AnswerLimits:
    """Return both deadlines, and what a token may take, of the clock."""
    assert SLO.per_token_s is not None
    return AnswerLimits(
        first_s=2 * DEADLINE_S + BUSY_S,
        token_s=10 * SLO.per_token_s * SLOWDOWN,  # as docs/operations.md says: `answer-timeout`
        event_s=30.0,  # and `token-timeout`, once
        vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
    )


def plan_for_gpus(model: Path, replicas: int = REPLICAS) -> Plan:
    """Return a plan of so many replicas of each role, with little KV cache."""
    nodes = [f"node-{at}" for at in range(2 * replicas)]
    prefill, decode = (
        make_pool(
            role,
            gpu="h100-sxm",
            tp=2,
            replicas=replicas,
            max_num_seqs=8,
            placement=places(*((node, (0, 1)) for node in of)),
        )
        for role, of in (("prefill", nodes[:replicas]), ("decode", nodes[replicas:]))
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
