from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.messages import RequestRefused
from serving.request.validation import check, parse_body

LIMITS = {"models": ("demo",), "max_model_len": 100}
HI = [{"role": "user", "content": "hi"}]


@given(st.binary())
def test_any_bytes_are_an_object_or_a_400(raw: bytes) -> None:
    try:
        assert isinstance(parse_body(raw, 100), dict)
    except RequestRefused as refused:
        assert refused.refusal.status == 400  # noqa: PT017  (either way is right)


DEEPEST = b'{"b": [], "a": ' + b"[" * 63 + b"]" * 63 + b"}"


@pytest.mark.parametrize(
    ("what", "raw"),
    [
        ("cut", b"{"),
        ("not UTF-8", b"\xff\xfe"),
        ("list", b"[]"),
        ("NaN", b'{"temperature": NaN}'),
        ("infinity", b'{"a": Infinity}'),
        ("1e999", b'{"a": 1e999}'),
        ("-1e400", b'{"a": [{"b": [1, -1e400]}]}'),
        ("400 digits", b'{"a": ' + b"1" * 400 + b".0}"),
        ("deep", b"[" * 60_000),
        ("65 levels", DEEPEST.replace(b"[[]]", b"[[[]]]")),
        ("UTF-16", '{"prompt": "x"}'.encode("utf-16")),
        ("raw half of a pair", b'{"prompt": "\xed\xa0\x80"}'),
        ("half of a pair", b'{"prompt": "\\ud800"}'),
        ("half of a pair as name", b'{"prompt": "x", "\\udfff": 1}'),
    ],
)
def test_what_is_no_json_object_of_at_most_64_levels(what: str, raw: bytes) -> None:
    assert parse_body(DEEPEST, 100)
    with pytest.raises(RequestRefused, match="The body is") as caught:
        parse_body(raw, 100)
    assert caught.value.refusal.status == 400, what
    json.dumps(caught.value.refusal.body, ensure_ascii=False).encode()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '[1, {"a": -1e400}]'])
@pytest.mark.parametrize("name", ["temperature", "prompt", "any_other"])
def test_numbers_that_are_none_are_refused_by_their_field(name: str, number: str) -> None:
    with pytest.raises(RequestRefused, match="The body is") as caught:
        parse_body(f'{{"a": 1.5, "{name}": {number}}}'.encode(), 100)
    assert (caught.value.refusal.status, caught.value.refusal.param) == (400, name)


@pytest.mark.parametrize("beyond", [2**64, -(2**63) - 1, [1, {"a": [10**40]}]])
def test_integers_beyond_64_bits_are_refused_by_their_field(beyond: object) -> None:
    """Between its processes vLLM passes none on; digits in a text are none."""
    fits = {"prompt": "1" * 40, "top_k": 2**64 - 1, "seed": -(2**63), "temperature": 1e30}
    assert parse_body(json.dumps(fits).encode(), 100) == fits
    with pytest.raises(RequestRefused) as caught:
        parse_body(json.dumps({"prompt": "x", "top_k": beyond}).encode(), 100)
    assert (caught.value.refusal.status, caught.value.refusal.param) == (400, "top_k")


@pytest.mark.parametrize("many", [b"[],", b"{},", b'"",', b"1,"])
def test_bodies_of_very_many_parts_are_refused_before_they_are_parsed(many: bytes) -> None:
    """The parser would stop everybody for seconds; text that looks like parts is a text."""
    with pytest.raises(RequestRefused, match="too many parts") as caught:
        parse_body(b'{"prompt": [' + many * 70_000, 1000)  # not even valid JSON
    assert caught.value.refusal.code == "too_many_parts"
    text = many.decode() * 70_000 + '\\"[]'
    assert parse_body(json.dumps({"prompt": text}).encode(), 1000) == {"prompt": text}


def test_two_prompts_of_the_whole_context_are_not_too_many_parts() -> None:
    body = {"prompt": [[5] * 100_000] * 2}
    assert parse_body(json.dumps(body).encode(), 100_000) == body


FORGED = [
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "request_id"),
    "prompt_embeds",
]


OPTIONS = {"include_usage": True}
NO_OPTIONS = ("abc", "", [1], [], 5, 0, True, {"include_usage": "maybe"}, [OPTIONS])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({name: {"any": "thing"}}, name) for name in FORGED),
        ({"model": "gpt-9"}, "model"),
        *(({"stream": value}, "stream") for value in (1, 0, "true", [])),
        *(({"n": value}, "n") for value in (0, "2", 1.5, 65)),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a", "b"], "n": 33}, "prompt"),
        *(({"prompt": bad}, "prompt") for bad in ([], [[1], [2] * 100], [1] * 100)),
        *(({"prompt": [1, bad]}, "prompt") for bad in (178819910326, 178819910326.0, 2**31)),
        *(({"prompt": [1, bad]}, "prompt") for bad in (-1, -(2**63) - 1, 2.5, "a", None, [2])),
        *(({"prompt": bad}, "prompt") for bad in (5, False, 1.5, {}, [None], [1.5, 2.5])),
        *(({"prompt": [bad, bad]}, "prompt") for bad in ([1, "a"], [], [[1]], {}, 0.5)),
        ({"prompt": ["a", [1]]}, "prompt"),
        *(({"stream": True, "stream_options": bad}, "stream_options") for bad in NO_OPTIONS),
        *(({**no, "stream_options": OPTIONS}, "stream_options") for no in ({}, {"stream": False})),
        *(({name: "1" * 20}, name) for name in ("top_k", "thinking_token_budget")),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids"),
        *(({"max_tokens": bad}, "max_tokens") for bad in (0, -1, True)),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 100}, "prompt"),
        ({"prompt": [1] * 60, "max_tokens": 41}, "prompt"),
        *(({"messages": bad}, "messages") for bad in ([], [1], [*HI, "a"], "abc", 5, None, {})),
        ({"messages": [{"role": "system", "content": {}}]}, "messages"),
        ({"messages": [*HI, {"role": "user", "content": 1}]}, "messages"),
        # Here echo is about the last message.
        ({"messages": HI, "echo": True, "max_tokens": 0}, "max_tokens"),
        # Of two lengths of a chat the engine reads `max_completion_tokens`.
        (
            {"messages": HI, "max_tokens": 50, "max_completion_tokens": 3, "min_tokens": 4},
            "min_tokens",
        ),
        ({"messages": HI, "max_tokens": -1, "max_completion_tokens": 50}, "max_tokens"),
    ],
)
def test_what_cannot_be_answered(body: dict[str, object], param: str) -> None:
    """Requests that would forge, hang, starve others or mislead are refused by their parameter."""
    kind, given_ = ("chat", body) if "messages" in body else ("completions", {"prompt": "x"} | body)
    with pytest.raises(RequestRefused) as caught:
        check(kind, given_, **LIMITS)
    status = 404 if param == "model" else 400
    assert (caught.value.refusal.status, caught.value.refusal.param) == (status, param)


TWO = [[1], [2] * 60]


@pytest.mark.parametrize(
    "body",
    [
        *({"n": 2, "best_of": best} for best in (2, None)),
        *({"prompt": prompt} for prompt in ("hi", [1, 2], [1.0], ["a", "b"], ["a"] * 64)),
        *({"prompt": [1] * 99, "max_tokens": tokens} for tokens in (1, None)),
        {"n": 64, "prompt_logprobs": 1, "use_beam_search": True},
        *({"stream": value} for value in (True, False, None)),
        *({"stream": True, "stream_options": given} for given in (OPTIONS, {}, None)),
        *({"stream_options": empty} for empty in ({}, None)),
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": ["a", "b"], "n": 32},
        {"prompt": [1] * 60, "max_tokens": 40},
        {"prompt": TWO, "n": 2, "max_tokens": 40},
        {"messages": HI, "temperature": 0.5},
        {"messages": HI, "max_tokens": 1, "max_completion_tokens": 50, "min_tokens": 40},
        {"messages": [*HI, {"role": "assistant", "content": None}, {"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    ],
)
def test_what_the_engine_answers_is_passed_on(body: dict[str, object]) -> None:
    """
    The body is as it came but for nulls, with the one model there is.

    Up to 64 answers and any look at the prompt; prompt and answer may fill the context of 100.
    """
    kind, given_ = ("chat", body) if "messages" in body else ("completions", {"prompt": "x"} | body)
    there = {name: value for name, value in given_.items() if value is not None}
    assert check(kind, given_, **LIMITS) == {**there, "model": "demo"}


@pytest.mark.parametrize(
    ("kind", "body", "passed_on"),
    [
        ("chat", {"messages": HI, "prompt": ["a", "b"]}, {"messages": HI}),
        ("chat", {"messages": HI, "prompt": [1] * 200}, {"messages": HI}),
        ("completions", {"prompt": "x", "messages": []}, {"prompt": "x"}),
        ("completions", {"prompt": "x", "max_completion_tokens": "one"}, {"prompt": "x"}),
        ("completions", {"prompt": ["hi"]}, {"prompt": "hi"}),
        ("completions", {"prompt": [[1, 2]], "n": 40}, {"prompt": [1, 2], "n": 40}),
    ],
)
def test_what_the_engine_does_not_read_is_left_out(
    kind: str, body: dict[str, object], passed_on: dict[str, object]
) -> None:
    """Fields of the other endpoint, which no process before it may read; a list of one prompt."""
    assert check(kind, body, **LIMITS) == {**passed_on, "model": "demo"}


def test_too_many_answers_are_counted_over_all_prompts() -> None:
    with pytest.raises(RequestRefused, match="at most 64 answers a request, not 66"):
        check("completions", {"model": "demo", "prompt": ["a"] * 33, "n": 2}, **LIMITS)


def test_a_string_counts_once_among_the_parts_of_a_body() -> None:
    prompts = ["a"] * 40_000
    assert parse_body(json.dumps({"prompt": prompts}).encode(), 50_000) == {"prompt": prompts}
