"""Admission among tenants: floods of one, and long prompts among short ones."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from minicluster.specs.slo import SloSpec
from serving.admission.controller import AdmissionController, InflightRequest
from serving.admission.policy import RequestCost
from serving.admission.tenants import (
    ANONYMOUS,
    OVER_ROOM,
    FairShares,
    KeyHolder,
    LongPrompts,
    Reserve,
    Tenant,
)
from serving.protocol.endpoint_config import EndpointConfig

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


@pytest.mark.parametrize("per_s", [1.0, 5.0, 10.0])
@pytest.mark.parametrize("tokens", [SHORT_TOKENS, 600])
def test_who_stays_below_its_share_is_served(
    slow: EndpointConfig, per_s: float, tokens: int
) -> None:
    """
    At three times the capacity, whatever the other sends.

    First come, first served lost 66 % of these requests beside short prompts.
    """
    alice = Stream(client=ALICE, per_s=per_s)
    others_per_s = (3 - per_s / CAPACITY) / (BASE_S + PER_TOKEN_S * tokens)
    flood = Stream(client=BOB, per_s=others_per_s, tokens=tokens)
    _run(slow, alice, flood)
    assert alice.share("shed") < 0.02
    assert alice.share("late") <= 0.01
    assert flood.share("late") <= 0.01


def test_shares_follow_the_weights(slow: EndpointConfig) -> None:
    """Of tenants that all want more than their share, whatever each sends; nothing is left idle."""
    weights = (1.0, 1.0, 2.0)
    clients = [KeyHolder(name=f"{n}", weight=weight) for n, weight in enumerate(weights)]
    rates = (50.0, 20.0, 30.0)
    streams = [Stream(client=each, per_s=rate) for each, rate in zip(clients, rates, strict=True)]
    _run(slow, *streams)
    served = [each.per_s * (1 - each.share("shed")) for each in streams]
    assert sum(served) > 0.95 * CAPACITY
    for stream, got in zip(streams, served, strict=True):
        assert got == pytest.approx(CAPACITY * stream.client.weight / 4, rel=0.15)


@pytest.mark.parametrize("per_s", [40, 75])
def test_long_prompts_are_let_in_half_as_often_as_short_ones(
    slow: EndpointConfig, per_s: float
) -> None:
    """
    Of ten times the mean length, under overload; an idle cluster serves them in time.

    None of them got in before, while 31 to 63 % of the short ones did.
    """
    short = Stream(client=ANONYMOUS, per_s=0.98 * per_s)
    long = Stream(client=ANONYMOUS, per_s=0.02 * per_s, tokens=10 * SHORT_TOKENS)
    _run(slow, short, long)
    assert 1 - long.share("shed") >= 0.5 * (1 - short.share("shed"))
    assert short.share("late") <= 0.01


@pytest.mark.parametrize("clients", [(ANONYMOUS, ANONYMOUS), (ALICE, BOB)])
def test_the_planned_load_is_served(
    slow: EndpointConfig, clients: tuple[KeyHolder, KeyHolder]
) -> None:
    """Nobody leaves room to others while all are served: at 80 % of the capacity."""
    rates = (0.6 * CAPACITY, 0.2 * CAPACITY)
    streams = [Stream(client=each, per_s=rate) for each, rate in zip(clients, rates, strict=True)]
    _run(slow, *streams)
    assert all(each.share("shed") + each.share("late") < 0.005 for each in streams)


def test_tenants_contend_where_several_are_refused() -> None:
    """Of two that are refused half of what they ask for, the one that had more leaves room."""
    for names in ("ab", "a"):
        shares, tenants = FairShares(), {name: Tenant(number=at) for at, name in enumerate(names)}
        shares.refresh(tenants, 0.0)
        for tenant, used_s in zip(tenants.values(), (20.0, 10.0), strict=False):
            tenant.seen_s = 1.0
            tenant.admitted_s, tenant.refused_s = used_s, used_s
        shares.refresh(tenants, 1.0)
        kept = {name: shares.kept_fraction(tenant) for name, tenant in tenants.items()}
        assert kept == ({"a": OVER_ROOM, "b": 0} if names == "ab" else {"a": 0})


def test_no_room_is_kept_before_a_refusal() -> None:
    assert Reserve().fraction == 0
    fresh = LongPrompts()
    assert (fresh.kept_s(0.1), fresh.short_admitted_fraction) == (0, 1)


def test_a_refusal_raises_a_reserve_by_three_hundredths() -> None:
    """An admission lowers it by the more, the less often the class is to be admitted."""
    reserve = Reserve()
    reserve.note(admitted=False, wanted_fraction=0.5)
    assert reserve.fraction == pytest.approx(0.03)
    reserve.note(admitted=False, wanted_fraction=0.5)
    reserve.note(admitted=True, wanted_fraction=0.5)
    assert reserve.fraction == pytest.approx(0.03)
    reserve.note(admitted=True, wanted_fraction=0.5)
    reserve.note(admitted=True, wanted_fraction=0.5)
    assert reserve.fraction == 0


def test_shares_are_what_the_smaller_demands_leave() -> None:
    """Two tenants ask for 3 and 5 of 30 s that are used; 22 s are left to the two others."""
    demands, used = (3.0, 5.0, 40.0, 14.0), (3.0, 5.0, 11.0, 11.0)
    tenants = {str(at): Tenant(number=at) for at in range(4)}
    shares = FairShares()
    shares.refresh(tenants, 0.0)
    for tenant, asked_s, had_s in zip(tenants.values(), demands, used, strict=True):
        tenant.seen_s, tenant.admitted_s, tenant.refused_s = 1.0, had_s, asked_s - had_s
    shares.refresh(tenants, 1.0)
    assert [tenant.light for tenant in tenants.values()] == [True, True, False, False]


def test_a_key_without_a_weight_has_that_of_the_others() -> None:
    assert KeyHolder().weight == 1


def test_the_longest_prompt_of_late_is_forgotten_slowly() -> None:
    """Another long one that is shorter takes half a per cent off; a longer one stands at once."""
    prompts = LongPrompts()
    prompts.note(0.1, admitted=True)
    for idle_s, longest_s in ((1.0, 1.0), (0.5, 0.995), (2.0, 2.0)):
        prompts.note(idle_s, admitted=True)
        assert prompts.longest_s == pytest.approx(longest_s)
