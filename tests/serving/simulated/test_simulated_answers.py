"""What simulated engines read and write: as vLLM does it, and as a function of the prompt."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from minicluster.engine_model.limits import EngineLimits, LoraLimits
from minicluster.engine_model.step_seconds import PlannedStep
from serving.protocol.messages import EngineFailed, Prefilled, Refusal
from serving.simulated.answering import (
    ENGINE_DIED,
    AnswerRules,
    SimulatedAnswers,
    SimulatedRequest,
    answer_ids,
    token_text,
)
from serving.simulated.engine import EngineClock, EngineLoad, SimulatedEngine
from serving.simulated.kv_transfer import KvSink, KvSource
from tests.plans import PATH, STEP
from tests.serving.virtual_time import run

LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=512, kv_blocks=100, block_size=16)
RULES = AnswerRules(model="m", vocab_size=1000, max_model_len=600, block_size=16, unasked_tokens=7)
STREAM = {"prompt": [5, 6, 7], "max_tokens": 3, "stream": True}


def read(kind: str = "completions", rules: AnswerRules = RULES, **body: Any) -> SimulatedRequest:  # noqa: ANN401
    request = rules.read(kind, body)
    assert isinstance(request, SimulatedRequest)
    return request


def said(text: str) -> int:
    return read(prompt=text).prompt_tokens


def engine(slowdown: float = 1.0, *, prefill_only: bool = False) -> SimulatedEngine:
    clock = EngineClock(slowdown)
    return SimulatedEngine(LIMITS, PlannedStep(STEP), clock, prefill_only=prefill_only)


def ask(kind: str, body: dict[str, Any], slowdown: float = 1.0) -> list[Any]:
    """Return the items of an answer, events as JSON where they are."""

    async def items() -> list[Any]:
        answers = SimulatedAnswers(engine(slowdown), RULES, {})
        return [item async for item in answers.answer(read(kind, **body))]

    return [event for item in run(items()) for event in (_read(item))]


def _read(item: Any) -> list[Any]:  # noqa: ANN401
    if not isinstance(item, list):
        return [item]
    assert all(event.endswith("\n\n") for event in item)
    events = [event.removeprefix("data: ").strip() for event in item]
    return [json.loads(event) if event.startswith("{") else event for event in events]


@pytest.mark.parametrize(
    ("text", "tokens"), [("", None), ("a", 1), ("four", 1), ("fiver", 2), ("é" * 4, 2)]
)
def test_four_bytes_of_text_are_a_token(text: str, tokens: int | None) -> None:
    if tokens is None:
        assert isinstance(RULES.read("completions", {"prompt": text}), Refusal)
    else:
        assert said(text) == tokens


def test_a_tokenizer_counts_text() -> None:
    class Words:
        def encode(self, text: str) -> Any:  # noqa: ANN401
            return type("Encoding", (), {"ids": list(range(len(text.split())))})

    rules = replace(RULES, tokenizer=Words())
    assert read(rules=rules, prompt="one two three").prompt_tokens == 3
    messages = [{"role": "user", "content": "one two"}, {"role": "user", "content": "three"}]
    assert read("chat", rules, messages=messages).prompt_tokens == 2 + 3


def test_equal_beginnings_share_the_ids_of_their_blocks() -> None:
    """Up to the first block that differs, and none after it, whatever is in it."""
    same, other = list(range(64)), [*range(16, 32), 99, *range(33, 64)]
    long, short = read(prompt=same).blocks, read(prompt=same[:40]).blocks
    assert (len(long), len(short)) == (4, 2)
    assert long[:2] == short
    assert not set(long) & set(read(prompt=other).blocks)
    changed = read(prompt=[*range(16), 99, *range(17, 64)]).blocks
    assert changed[0] == long[0]
    assert not set(changed[1:]) & set(long)


def test_another_salt_shares_no_block() -> None:
    """Equal prompts of two tenants are different contents; of one they are the same."""
    plain, *salted = (
        read(prompt=list(range(64)), **salt).blocks
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"})
    )
    assert salted[0] == salted[2]
    assert len({*plain, *salted[0], *salted[1]}) == 3 * len(plain)


def test_a_request_names_an_adapter() -> None:
    """The answer says its name, and its contents are those of no other."""
    rules = replace(RULES, adapters=("red", "blue"))
    plain, *named = (
        read(rules=rules, prompt=list(range(64)), **model)
        for model in ({}, {"model": "m"}, {"model": "red"}, {"model": "blue"})
    )
    assert [(each.model, each.adapter) for each in named] == [("m", -1), ("red", 0), ("blue", 1)]
    assert plain.blocks == named[0].blocks
    assert len({*plain.blocks, *named[1].blocks, *named[2].blocks}) == 3 * len(plain.blocks)


def test_the_adapter_goes_with_a_request_to_both_engines() -> None:
    """Its copy is waited for in prefill and in decode, and what has been copied stays."""
    lora, rules = LoraLimits(slots=2, load_s=0.5), replace(RULES, adapters=("red", "blue"))

    async def seconds() -> list[float]:
        clock, told = EngineClock(1.0), []
        prefill, decode = (
            SimulatedEngine(LIMITS, PlannedStep(STEP), clock, prefill_only=of, lora=lora)
            for of in (True, False)
        )
        source = KvSource(prefill, PATH)
        first = SimulatedAnswers(prefill, rules, {}, source=source, lease_s=9.0)
        last = SimulatedAnswers(decode, rules, {})

        async def fetch(place: Any, start_in_s: float) -> Any:  # noqa: ANN401
            return source.fetch(place["key"], start_in_s)

        last.pull_by(KvSink(decode, fetch))
        for name in ("m", "red", "red", "blue"):
            request = read(rules=rules, prompt=[1] * 50, max_tokens=1, model=name)
            begun_s = clock.now_s()
            prefilled = await first.compute(request, keep=True)
            assert isinstance(prefilled, Prefilled)
            [answer] = [item async for item in last.answer(last.for_decode(request, prefilled))]
            assert isinstance(answer, dict)
            assert answer["model"] == name
            told.append(clock.now_s() - begun_s)
        return told

    plain_s, first_s, again_s, other_s = run(seconds())
    assert first_s - plain_s == pytest.approx(2 * lora.load_s, abs=0.01)
    assert again_s <= plain_s
    assert other_s == pytest.approx(first_s)


@pytest.mark.parametrize(
    ("kind", "body", "tokens", "reason"),
    [
        ("completions", {"prompt": [1, 2, 3], "max_tokens": 5}, 5, "length"),
        ("completions", {"prompt": [1, 2, 3]}, 16, "length"),  # vLLM's default for a completion
        ("completions", {"prompt": [1, 2, 3], "max_tokens": 597}, 597, "length"),  # all there is
        ("chat", {"messages": [{"role": "user", "content": "hi"}]}, 7, "stop"),  # the planned one
    ],
)
def test_the_length_of_an_answer(kind: str, body: Any, tokens: int, reason: str) -> None:  # noqa: ANN401
    request = read(kind, **body)
    assert (request.max_tokens, request.finish_reason) == (tokens, reason)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": [1], "n": 2}, "n", "unsupported_value"),
        ({"prompt": [1], "logprobs": 1}, "logprobs", "unsupported_value"),
        ({"prompt": [1], "use_beam_search": True}, "use_beam_search", "unsupported_value"),
        ({"prompt": [[1], [2]]}, "prompt", "unsupported_value"),
        ({"prompt": [1] * 598, "max_tokens": 3}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 2400}, "prompt", "context_length_exceeded"),
    ],
)
def test_what_is_not_simulated_is_refused(body: dict[str, Any], param: str, code: str) -> None:
    refusal = RULES.read("completions", body)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code)
    assert param in refusal.message or code == "context_length_exceeded"


def test_a_stream_has_an_event_for_each_token() -> None:
    ids = answer_ids(read(**STREAM).seed, 3, 1000)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, usage, done = ask(
        "completions", {**STREAM, "stream_options": options, "return_token_ids": True}
    )
    assert [event["choices"][0]["token_ids"] for event in events] == [[each] for each in ids]
    texts = [event["choices"][0]["text"] for event in events]
    assert texts == [*map(token_text, ids)]
    assert all(re.fullmatch(r" [a-z]+[.,]?", text) for text in texts)  # a word for each token
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert {event["id"] for event in [*events, usage]} == {events[0]["id"]}
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert done == "[DONE]"

    *without, done = ask("completions", STREAM)
    assert (len(without), done) == (3, "[DONE]")
    assert not any("usage" in event for event in without)


def test_a_whole_answer_says_what_the_stream_says() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 3}
    *events, _ = ask("chat", {**body, "stream": True})
    [whole] = ask("chat", body)
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    roles = [event["choices"][0]["delta"].get("role") for event in events]
    assert roles == ["assistant", None, None]
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert (events[0]["object"], whole["object"]) == ("chat.completion.chunk", "chat.completion")
    assert whole["usage"]["completion_tokens"] == 3


def test_other_prompts_have_other_answers() -> None:
    answers = {
        ask("completions", {"prompt": [each]})[0]["choices"][0]["text"] for each in range(50)
    }
    assert len(answers) == 50


@pytest.mark.parametrize("slowdown", [1.0, 25.0])
def test_the_engine_s_own_times_are_the_clock_s(slowdown: float) -> None:
    [whole] = ask("completions", {"prompt": [1] * 100, "max_tokens": 2}, slowdown)
    step_s = PlannedStep(STEP).step_s([(100, 0)], 0, 0)
    assert whole["metrics"]["queue_time_ms"] == pytest.approx(0.0)
    assert whole["metrics"]["time_to_first_token_ms"] == pytest.approx(step_s * slowdown * 1e3)


def test_an_engine_that_dies_says_so_and_computes_nothing_more() -> None:
    async def items() -> list[Any]:
        dead = engine()
        answers = SimulatedAnswers(dead, RULES, {})
        stream = answers.answer(read(**STREAM))
        found = [await anext(stream)]
        dead.fail()
        found += [item async for item in stream]
        found += [item async for item in answers.answer(read(**STREAM))]
        assert answers.died()
        with pytest.raises(EngineFailed):
            await answers.compute(read(**STREAM), keep=True)
        return found

    first, *rest = run(items())
    assert "choices" in first[0]
    assert rest == [ENGINE_DIED, ENGINE_DIED]


def test_a_lost_stream_ends_after_its_first_token() -> None:
    async def items() -> tuple[list[Any], list[Any]]:
        answers = SimulatedAnswers(engine(), RULES, {})
        answers.lose_next = 1
        lost = [item async for item in answers.answer(read(**STREAM))]
        return lost, [item async for item in answers.answer(read(**STREAM))]

    lost, whole = run(items())
    assert len(lost) == 2
    assert lost[-1] == ENGINE_DIED
    assert whole[-1][-1] == "data: [DONE]\n\n"


def test_a_prompt_is_computed_once_for_prefill_and_decode() -> None:
    """Decode is told where it is; a prompt that is only timed is not kept."""

    async def go() -> None:
        prefill, decode = engine(prefill_only=True), engine()
        source = KvSource(prefill, PATH)
        computing = SimulatedAnswers(prefill, RULES, {}, source=source, lease_s=9.0)
        answering = SimulatedAnswers(decode, RULES, {})

        async def fetch(place: Any, start_in_s: float) -> Any:  # noqa: ANN401
            return source.fetch(place["key"], start_in_s)

        answering.pull_by(KvSink(decode, fetch))
        request = read(prompt=list(range(100)), max_tokens=2)
        timed = await computing.compute(request, keep=False)
        assert not isinstance(timed, Refusal)
        assert timed.prompt_tokens == 100
        assert await computing.kv_is_free()
        computed = await computing.compute(request, keep=True)
        assert not isinstance(computed, Refusal)
        assert not await computing.kv_is_free()
        done = Prefilled(
            kv_transfer_params=dict(computed.kv_transfer_params),
            replica="p7", queue_s=computed.queue_s, step_s=computed.step_s,
        )  # fmt: skip
        begun_s = decode.clock.now_s()
        [_whole] = [item async for item in answering.answer(answering.for_decode(request, done))]
        # Two steps of decode, none of which has the prompt in it.
        assert decode.clock.now_s() - begun_s == pytest.approx(2 * STEP.base_s)
        await asyncio.sleep(0)
        assert await computing.kv_is_free()

    run(go())


def test_an_answer_that_nobody_reads_to_its_end_gives_back_its_place() -> None:
    async def go() -> None:
        used = engine()
        answers = SimulatedAnswers(used, RULES, {})
        stream = answers.answer(read(prompt=[1], max_tokens=500, stream=True))
        await anext(stream)
        await stream.aclose()
        await used.clock.sleep(1.0)
        assert used.num_requests == 0

    run(go())


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_prompt_that_is_cancelled_at_any_time_gives_back_its_blocks(
    share: float, *, keep: bool
) -> None:
    """Before its step, in it, and as it ends: a deadline of decode may pass at any of them."""

    async def go() -> None:
        used = engine(prefill_only=True)
        computing = SimulatedAnswers(used, RULES, {}, source=KvSource(used, PATH), lease_s=9.0)
        step_s = PlannedStep(STEP).step_s([(100, 0)], 0, 0)
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(computing.compute(read(prompt=[1] * 100), keep=keep))
        await asyncio.sleep(0)
        loop.call_at(share * step_s, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        await used.clock.sleep(1.0)
        assert used.load() == EngineLoad(running=0, waiting=0, kv_blocks=0)

    run(go())
