"""Admission where decode computes prompts: of aggregated plans all, of split ones a few."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import Placement
from minicluster.specs.slo import SloSpec
from serving.admission.controller import AdmissionController, InflightRequest
from serving.admission.policy import RequestCost, request_cost
from serving.protocol.endpoint_config import EndpointConfig, endpoint_config
from serving.request.length import DEFAULT_ESTIMATE

from .test_admission_controller import let_in

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.conftest import DeploymentMaker, PlanMaker, PoolMaker

BASE_S, PER_TOKEN_S = 0.01, 1e-4
"""Of the plan's steps: 10 ms a step and 0.1 ms a prompt token."""

STEP_TOKENS = 1000
PLACES = 16


@pytest.fixture(scope="module")
def mixed(
    make_deployment: DeploymentMaker, make_plan: PlanMaker, make_pool: PoolMaker, small_model: Path
) -> EndpointConfig:
    """Return an aggregated plan of two replicas."""
    places = (Placement(node="laptop", gpus=(0, 1)),)
    size = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": PLACES}
    pool = make_pool("mixed", replicas=2, placement=places, **size)
    deployment = replace(make_deployment(small_model), pools=(pool,))
    plan = make_plan(deployment).under(slo=SloSpec(ttft_s=0.5, tpot_s=2.0))
    return endpoint_config(deployment, domains={"laptop": "d0"}, plan=plan)


def _alone(config: EndpointConfig, slo: SloSpec) -> AdmissionController:
    """Return a admission of one replica of an aggregated plan."""
    admission = AdmissionController(replace(config, slo=slo), seed=2)
    admission.inflight.set_replicas({("mixed", "d0"): 1})
    return admission


def test_prompts_that_wait_are_seen(mixed: EndpointConfig) -> None:
    """Each adds its 40 ms, and four tenths of a step; after their first tokens none waits."""
    admission = _alone(mixed, SloSpec(ttft_s=0.5, tpot_s=2.0))
    admitted, shed = let_in(admission, RequestCost(prompt_tokens=400, output_tokens=1, local=True))
    # own prompt 50 ms, one step of 10 ms, margin 10 % of 500 ms: at most 0.39 s ahead
    assert len(admitted) == 9
    assert shed.reason == "ttft"
    load = admission.inflight.load("d0")
    assert load.local_work_s == pytest.approx(9 * (0.04 + 0.4 * BASE_S))
    assert load.prefill_work_s == 0
    assert sum(admission.inflight.backlog_s().values()) == load.local_work_s
    assert admission.inflight.waiting == 9
    for request in admitted:
        admission.first_token(request, 0.1)
    assert admission.inflight.load("d0").local_work_s == 0
    for request in admitted:
        admission.end(request, None)
    assert admission.inflight.load("d0").idle


def test_prompts_of_others_are_between_the_tokens(mixed: EndpointConfig) -> None:
    """Where each answer is followed by another one, its prompt comes between all tokens."""
    admission = _alone(mixed, SloSpec(ttft_s=30.0, tpot_s=0.05))
    admitted, shed = let_in(admission, RequestCost(prompt_tokens=400, output_tokens=9, local=True))
    # a step of 10 ms, 10 % of 50 ms for the margin: 35 ms for prompts, each 44 ms in ten tokens
    assert len(admitted) == 8
    assert shed.reason == "tpot"
    for request in admitted:
        admission.end(request, None)
    assert admission.inflight.load("d0").local_per_token_s == 0


def test_a_list_takes_the_time_of_all_its_prompts(mixed: EndpointConfig) -> None:
    """Others wait for all of them; the first token of the list for one."""
    admission = _alone(mixed, SloSpec(ttft_s=0.5, tpot_s=2.0))
    body = {"prompt": [[5] * 400, *([[5] * 100] * 10)], "max_tokens": 3}
    asked = request_cost("completions", body, mixed, DEFAULT_ESTIMATE)
    assert (asked.prompt_tokens, asked.sequences, sum(asked.other_tokens)) == (400, 11, 1000)
    request = admission.admit(asked)
    assert isinstance(request, InflightRequest)
    assert request.forecast is not None
    assert request.forecast.ttft_s == pytest.approx(0.06)
    load = admission.inflight.load("d0")
    assert load.local_work_s == pytest.approx(0.14 + 1.4 * BASE_S)


def test_local_prompts_are_no_work_of_the_prefill_pool(config: EndpointConfig) -> None:
    """They delay the tokens of all answers decoded beside them, and each other."""
    admission = AdmissionController(config, seed=1)
    remote = RequestCost(prompt_tokens=400, output_tokens=10)
    alone = admission.admit(replace(remote, prompt_tokens=1))
    local = admission.admit(RequestCost(prompt_tokens=400, output_tokens=19, local=True))
    assert isinstance(alone, InflightRequest)
    assert isinstance(local, InflightRequest)
    load = admission.inflight.load("d0")
    assert load.prefill_work_s == pytest.approx(BASE_S + PER_TOKEN_S)
    assert load.local_work_s == pytest.approx(0.04 + 400 / 2048 * BASE_S)
    beside, second = admission.admit(remote), admission.admit(local.cost)
    assert isinstance(beside, InflightRequest)
    assert isinstance(second, InflightRequest)
    assert beside.forecast is not None
    assert second.forecast is not None
    per_token_s = load.local_work_s / 20
    assert beside.forecast.tpot_s == pytest.approx(BASE_S + per_token_s)
    assert second.forecast.ttft_s == pytest.approx(load.local_work_s + 0.05 + BASE_S)


def test_dead_mixed_replicas_are_noticed(mixed: EndpointConfig) -> None:
    """One replica of two lets half as many in; one is always assumed."""
    asked = RequestCost(prompt_tokens=400, output_tokens=1, local=True)
    both, _ = let_in(AdmissionController(mixed, seed=1), asked)
    admission = AdmissionController(mixed, seed=1)
    for live in (0, 1):
        admission.inflight.set_replicas({("mixed", "d0"): live})
        assert admission.inflight.load("d0").decode_replicas == 1
    one, _ = let_in(admission, asked)
    assert len(both) == 2 * len(one)


@dataclass(slots=True)
class Running:
    """A request at the simulated engine: tokens of its prompt and of its answer still to make."""

    request: InflightRequest
    came_s: float
    prompt: int
    output: int
    first_s: float = 0.0


class Engine:
    """One aggregated replica, step by step as vLLM schedules it: tokens first, then prompts."""

    def __init__(self, admission: AdmissionController, slower: float) -> None:
        """Steps take *slower* times the plan's, and vary."""
        self._admission = admission
        self._slower = slower
        self._rng = random.Random(5)  # noqa: S311
        self._waiting = deque[Running]()
        self._running: list[Running] = []
        self.ttfts: list[float] = []
        self.tpots: list[float] = []
        self.busy_s = 0.0

    def add(self, request: Running) -> None:
        """Queue an admitted request."""
        self._waiting.append(request)

    def step_s(self) -> float:
        """Begin a step; return how long it takes, 0 without requests."""
        while self._waiting and len(self._running) < PLACES:
            self._running.append(self._waiting.popleft())
        if not self._running:
            return 0.0
        room = STEP_TOKENS - sum(not each.prompt for each in self._running)
        computed = 0
        for each in self._running:
            part = min(each.prompt, room - computed)
            each.prompt -= part
            computed += part
            each.output -= not each.prompt  # its prompt's last part makes a token too
        took_s = (BASE_S + PER_TOKEN_S * computed) * self._slower * self._rng.lognormvariate(0, 0.2)
        self.busy_s += took_s
        return took_s

    def end(self, now_s: float) -> None:
        """End the step."""
        for each in self._running:
            if not each.prompt and not each.first_s:
                each.first_s = now_s
                self.ttfts.append(now_s - each.came_s)
                self._admission.first_token(each.request, now_s - each.came_s)
        for each in [each for each in self._running if not each.output]:
            self._running.remove(each)
            after = each.request.cost.output_tokens - 1
            self.tpots.append((now_s - each.first_s) / after)
            self._admission.end(each.request, self.tpots[-1])


def _overloaded(
    admission: AdmissionController, asked: RequestCost, per_s: float, slower: float
) -> tuple[Engine, float]:
    """Have 5,000 requests arrive at one engine; return it, and when the last one came."""
    rng = random.Random(4)  # noqa: S311
    engine, now_s, end_s = Engine(admission, slower), 0.0, 0.0
    for _ in range(5000):
        now_s += rng.expovariate(per_s)
        while end_s and end_s <= now_s:
            engine.end(end_s)
            took_s = engine.step_s()
            end_s = end_s + took_s if took_s else 0.0
        found = admission.admit(asked)
        if isinstance(found, InflightRequest):
            came = Running(found, now_s, int(asked.prompt_tokens), int(asked.output_tokens))
            engine.add(came)
            end_s = end_s or now_s + engine.step_s()
    return engine, now_s


@pytest.mark.parametrize("slower", [0.8, 1.5])
@pytest.mark.parametrize(
    ("output_tokens", "slo"),
    [(3, SloSpec(ttft_s=0.5, tpot_s=2.0)), (10, SloSpec(ttft_s=0.5, tpot_s=0.06))],
    ids=["first token", "pace"],
)
def test_an_overloaded_mixed_pool_keeps_its_slo(
    mixed: EndpointConfig, output_tokens: int, slo: SloSpec, slower: float
) -> None:
    """At three times capacity 99 % of the admitted keep both limits, and the engine stays busy."""
    asked = RequestCost(prompt_tokens=400, output_tokens=output_tokens, local=True)
    per_s = 3 / (400 * PER_TOKEN_S * slower)
    engine, now_s = _overloaded(_alone(mixed, slo), asked, per_s, slower)
    assert _p99(engine.ttfts) <= slo.ttft_s
    assert slo.tpot_s is not None
    assert _p99(engine.tpots) <= slo.tpot_s
    assert engine.busy_s > 0.9 * now_s


def _p99(values: list[float]) -> float:
    """Return the 99th percentile, without the first fifth, which taught the admission."""
    kept = sorted(values[len(values) // 5 :])
    return kept[int(0.99 * len(kept))]
