"""Admission while one key floods: what is admitted is on time, and limits protect the others."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from minicluster.specs.slo import SloSpec
from serving.admission.controller import ANONYMOUS, AdmissionController, InflightRequest, KeyHolder
from serving.protocol.messages import EndpointConfig
from serving.request.cost import RequestCost

LIMIT_S = 1.0
BASE_S, PER_TOKEN_S = 0.01, 5e-4
SHORT_TOKENS = 60
CAPACITY = 1 / (BASE_S + PER_TOKEN_S * SHORT_TOKENS)
"""Short prompts that one prefill replica computes in a second: 25."""

ALICE, BOB = KeyHolder(name="alice"), KeyHolder(name="bob")
SECONDS = 150.0
"""Of arrivals; the first third teaches the admission."""


@pytest.fixture
def slow(config: EndpointConfig) -> EndpointConfig:
    """Return a plan of one prefill replica, of which 1,970 tokens take all of the TTFT allowed."""
    step = config.step_model
    assert step is not None
    prefill = replace(step.prefill, base_s=BASE_S, per_prefill_token_s=PER_TOKEN_S)
    return replace(
        config,
        max_model_len=4096,
        step_model=replace(step, prefill=prefill),
        slo=SloSpec(ttft_s=LIMIT_S, tpot_s=2.0),
    )


@dataclass(kw_only=True)
class Stream:
    """Requests that are all alike, and what became of them."""

    client: KeyHolder
    per_s: float
    tokens: int = SHORT_TOKENS
    seen: Counter[str] = field(default_factory=Counter)

    def share(self, outcome: str) -> float:
        return self.seen[outcome] / self.seen["sent"]


def _run(config: EndpointConfig, *streams: Stream) -> None:
    """Let the streams meet one prefill replica that computes prompts in their order."""
    rng, now_s, free_s = random.Random(1), 0.0, 0.0  # noqa: S311
    admission = AdmissionController(config, seed=3, clock=lambda: now_s)
    arrivals = []
    for number, stream in enumerate(streams):
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(stream.per_s)) < SECONDS:
            arrivals.append((at_s, number))
    events: list[tuple[float, int, str, InflightRequest, float]] = []
    for count, (at_s, number) in enumerate(sorted(arrivals)):
        while events and events[0][0] <= at_s:
            now_s, _, event, request, value = heapq.heappop(events)
            if event == "first":
                admission.first_token(request, value)
            else:
                admission.end(request, 0.01, int(value))
        now_s, stream = at_s, streams[number]
        cost = RequestCost(prompt_tokens=stream.tokens, output_tokens=10)
        found = admission.admit(cost, stream.client)
        counted = at_s > SECONDS / 3
        stream.seen["sent"] += counted
        if not isinstance(found, InflightRequest):
            stream.seen["shed"] += counted
            continue
        took_s = BASE_S + PER_TOKEN_S * stream.tokens
        free_s = max(free_s, at_s) + took_s * rng.lognormvariate(0, 0.1)
        ttft_s = free_s + 0.01 - at_s
        stream.seen["late"] += counted and ttft_s > LIMIT_S
        heapq.heappush(events, (at_s + ttft_s, 2 * count, "first", found, ttft_s))
        end_s = at_s + ttft_s + 0.1
        heapq.heappush(events, (end_s, 2 * count + 1, "end", found, float(stream.tokens)))


@pytest.mark.parametrize("limit", [{"requests_per_s": 5.0}, {"tokens_per_min": 21_000.0}])
def test_a_limit_of_a_flooding_key_keeps_the_others_whole(
    slow: EndpointConfig, limit: dict[str, Any]
) -> None:
    """At three times the capacity; the limit is a fifth of it: 300 requests a minute."""
    alice = Stream(client=ALICE, per_s=0.6 * CAPACITY)
    flood = Stream(client=KeyHolder(name="bob", **limit), per_s=2.4 * CAPACITY)
    _run(slow, alice, flood)
    assert alice.share("shed") + alice.share("late") < 0.01
    served = flood.per_s * (1 - flood.share("shed"))
    assert served == pytest.approx(CAPACITY / 5, rel=0.1)


@pytest.mark.parametrize("tokens", [SHORT_TOKENS, 600])
def test_what_is_admitted_in_a_flood_without_limits_is_on_time(
    slow: EndpointConfig, tokens: int
) -> None:
    """Whoever sent it; equal requests are refused alike, and long ones more often."""
    alice = Stream(client=ALICE, per_s=0.2 * CAPACITY)
    flood = Stream(client=BOB, per_s=2.8 / (BASE_S + PER_TOKEN_S * tokens), tokens=tokens)
    _run(slow, alice, flood)
    assert alice.share("late") <= 0.01
    assert flood.share("late") <= 0.01
    if tokens == SHORT_TOKENS:
        assert alice.share("shed") == pytest.approx(flood.share("shed"), abs=0.05)
    else:
        assert alice.share("shed") < 0.2 < flood.share("shed")


@pytest.mark.parametrize("clients", [(ANONYMOUS, ANONYMOUS), (ALICE, BOB)])
def test_the_planned_load_is_served(
    slow: EndpointConfig, clients: tuple[KeyHolder, KeyHolder]
) -> None:
    """At 80 % of the capacity."""
    rates = (0.6 * CAPACITY, 0.2 * CAPACITY)
    streams = [Stream(client=each, per_s=rate) for each, rate in zip(clients, rates, strict=True)]
    _run(slow, *streams)
    assert all(each.share("shed") + each.share("late") < 0.005 for each in streams)
