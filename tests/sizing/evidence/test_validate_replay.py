"""The replay of one replica, against what follows by hand from its rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sizing import catalog
from sizing.evidence.load import repeated, requests
from sizing.evidence.replay import ReplayedReplica, ReplayedRequest, RowReplay
from sizing.evidence.steps import StepTable

RULES = {profile.name: profile.scheduling for profile in catalog.engines()}
PROMPT_TOKEN_S = 1e-3
STEP_S = 1e-2


def linear(largest: float = 1e6) -> StepTable:
    """Steps of 10 ms, plus 1 ms per prompt token."""
    tokens = [0.0, largest]
    return StepTable(
        tokens=tokens,
        sequences=[0.0, largest],
        contexts=[0.0, largest],
        plain=[[STEP_S + PROMPT_TOKEN_S * n] * 2 for n in tokens],
        per_cached=[0.0, 0.0],
        attention=[[0.0, 0.0], [0.0, 0.0]],
    )


def replica(engine: str = "vllm", *, budget: int = 100, kv_tokens: float = 1e9) -> ReplayedReplica:
    """Return a replica with the rules of an engine and steps known by hand."""
    return ReplayedReplica(
        steps=linear(),
        rules=RULES[engine],
        max_num_seqs=1024,
        token_budget=budget,
        kv_tokens=kv_tokens,
        overhead_s=0.0,
    )


def test_one_request_alone() -> None:
    """One step of 50 + 10 ms gives the first token, three more the others."""
    (served,) = RowReplay(replica(), [ReplayedRequest(50, 0, 4)], None, 1).run()
    assert served.first_s == pytest.approx(0.06)
    assert served.last_s == pytest.approx(0.06 + 3 * STEP_S)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """250 tokens in a budget of 100 take three steps."""
    (served,) = RowReplay(replica(), [ReplayedRequest(250, 0, 1)], None, 1).run()
    assert served.first_s == pytest.approx(0.25 + 3 * STEP_S)


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own() -> None:
    """Two prompts of 60 in a budget of 100: vLLM cuts the second, TensorRT-LLM waits."""
    two = [ReplayedRequest(60, 0, 1), ReplayedRequest(60, 0, 1)]
    cut = RowReplay(replica("vllm"), two, None, 2).run()
    whole = RowReplay(replica("trtllm"), two, None, 2).run()
    assert [each.first_s for each in cut] == pytest.approx([0.11, 0.14])
    assert [each.first_s for each in whole] == pytest.approx([0.07, 0.14])


def test_decoding_pauses_for_prompts_where_the_engine_does_not_mix() -> None:
    """While a second prompt is computed, SGLang makes no token of the first request; vLLM does."""
    two = [ReplayedRequest(10, 0, 3), ReplayedRequest(50, 0, 1)]
    paused = RowReplay(replica("sglang"), two, [0.0, 0.021], 0).run()
    mixed = RowReplay(replica("vllm"), two, [0.0, 0.021], 0).run()
    first = {name: max(r, key=lambda e: e.output) for name, r in (("s", paused), ("v", mixed))}
    # The first request: prompt until 20 ms, a token at 30 ms, then the second prompt's 60 ms.
    assert first["v"].last_s == pytest.approx(0.03 + 0.06)
    assert first["s"].last_s == pytest.approx(0.03 + 0.06 + STEP_S)


def test_who_arrives_during_a_step_waits_for_the_one_after_the_next() -> None:
    """Where steps are put together one ahead; on an idle replica nobody waits."""
    ahead = replace(replica(), ahead=True)
    drawn = [ReplayedRequest(10, 0, 9), ReplayedRequest(50, 0, 1)]
    # Steps end at 20, 30, 40 ms ...; at 33 ms the one from 40 ms on is already put together.
    late, first = (
        min(RowReplay(each, drawn, [0.0, 0.033], 0).run(), key=lambda e: e.output)
        for each in (ahead, replica())
    )
    assert first.first_s == pytest.approx(0.04 + 0.06)
    assert late.first_s == pytest.approx(0.05 + 0.06)
    one, two = RowReplay(
        ahead, [ReplayedRequest(10, 0, 2), ReplayedRequest(50, 0, 1)], [0.0, 0.05], 0
    ).run()
    assert (one.last_s, two.first_s) == pytest.approx((0.03, 0.05 + 0.06))


def test_prompts_wait_for_company_where_the_recipe_says_so() -> None:
    """At most so many steps, not at all beside nobody, and no longer than the budget is filled."""
    patient = replace(replica(budget=100), wait_steps=4, wait_fraction=0.9)
    alone = ReplayedRequest(10, 0, 30)
    one = RowReplay(patient, [alone, ReplayedRequest(20, 0, 1)], [0.0, 0.015], 0).run()
    many = RowReplay(
        patient, [alone, *[ReplayedRequest(45, 0, 1)] * 2], [0.0, 0.015, 0.025], 0
    ).run()
    # The first prompt takes 20 ms; the second waits until 60 ms, then takes 30 ms with its step.
    assert min(e.first_s for e in one) == pytest.approx(0.02)
    assert max(e.first_s for e in one) == pytest.approx(0.06 + 0.03)
    # Two of 45 tokens fill the budget: they wait from 20 ms to the next boundary only.
    assert max(e.first_s for e in many) == pytest.approx(0.03 + 0.1)


def test_prompts_sent_before_are_in_the_cache() -> None:
    """All but the last, unfinished block of 16; the first round computes everything."""
    drawn = requests(5, isl=547, osl=9, prefix=100)
    found = repeated(drawn, 2)
    assert [each.computed for each in found] == [447, 447, 3, 3, 3]
    assert all(each.computed + each.cached == 547 for each in found)


def test_full_kv_cache_makes_requests_wait() -> None:
    """TensorRT-LLM reserves a request whole: with room for one, the second waits for its end."""
    two = [ReplayedRequest(50, 0, 10), ReplayedRequest(50, 0, 10)]
    first, second = RowReplay(replica("trtllm", kv_tokens=100), two, None, 2).run()
    assert second.first_s == pytest.approx(first.last_s + 0.06)


def test_preempted_requests_start_over_and_finish() -> None:
    """VLLM admits both, drops the younger when the cache is full, and computes it again."""
    two = [ReplayedRequest(40, 0, 30), ReplayedRequest(40, 0, 30)]
    roomy = RowReplay(replica(budget=200), two, None, 2).run()
    tight = RowReplay(replica(budget=200, kv_tokens=100), two, None, 2).run()
    assert max(e.last_s for e in tight) > max(e.last_s for e in roomy)
    assert len(tight) == 2


def test_users_send_again_when_their_answer_ended() -> None:
    """One user: five requests one after the other."""
    served = RowReplay(replica(), [ReplayedRequest(10, 0, 2)] * 5, None, 1).run()
    assert [e.sent_s for e in served] == pytest.approx([i * (0.02 + STEP_S) for i in range(5)])


@settings(max_examples=60, deadline=None)
@given(
    engine=st.sampled_from(sorted(RULES)),
    users=st.integers(1, 12),
    isl=st.integers(1, 300),
    osl=st.integers(1, 40),
    jitter=st.sampled_from([0.0, 0.2, 0.9]),
    kv_tokens=st.sampled_from([50.0, 400.0, 1e9]),
    ahead=st.booleans(),
)
def test_everybody_is_served_and_no_step_is_skipped(  # noqa: PLR0913  (what is varied)
    engine: str, users: int, isl: int, osl: int, jitter: float, kv_tokens: float, *, ahead: bool
) -> None:
    """Whatever the load: all requests end, none before its tokens could have been computed."""
    drawn = requests(users * 4, isl=isl, osl=osl, jitter=jitter)
    one = replace(replica(engine, kv_tokens=kv_tokens), ahead=ahead)
    served = RowReplay(one, drawn, None, users).run()
    assert len(served) == len(drawn)
    for each in served:
        assert each.first_s >= each.sent_s + STEP_S
        assert each.last_s >= each.first_s + (each.output - 1) * STEP_S - 1e-9
    computed = sum(request.computed for request in drawn)
    assert max(e.last_s for e in served) >= computed * PROMPT_TOKEN_S


def test_more_kv_cache_never_serves_later() -> None:
    """The mean wait for the first token falls with room."""
    drawn = requests(80, isl=200, osl=50, jitter=0.2)
    waits = [
        sum(e.first_s - e.sent_s for e in RowReplay(each, drawn, None, 8).run())
        for each in (
            replace(replica("trtllm", budget=300), kv_tokens=room) for room in (300, 900, 5000)
        )
    ]
    assert waits == sorted(waits, reverse=True)


def test_lengths_are_drawn_as_the_schema_says() -> None:
    """Uniform in [(1 - j) nominal, nominal]: mean 0.9 at j = 0.2; the same every time."""
    drawn = requests(4000, isl=1000, osl=500, jitter=0.2)
    lengths = [request.computed for request in drawn]
    assert (min(lengths), max(lengths)) == (800, 1000)
    assert sum(lengths) / len(lengths) == pytest.approx(900, rel=0.01)
    assert drawn == requests(4000, isl=1000, osl=500, jitter=0.2)
    assert {request.output for request in requests(9, isl=7, osl=5)} == {5}
