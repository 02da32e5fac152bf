from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.messages import Refusal, RequestRefused
from serving.request.validation import check, parse_body

LIMITS = {"model_id": "demo", "max_model_len": 100}
HI = [{"role": "user", "content": "hi"}]


def _refused(body: dict[str, object], kind: str = "completions") -> Refusal:
    with pytest.raises(RequestRefused) as caught:
        check(kind, body, **LIMITS)
    return caught.value.refusal


@given(st.binary())
def test_any_bytes_are_an_object_or_a_400(raw: bytes) -> None:
    """Whatever is sent is either a JSON object or refused with 400."""
    try:
        assert isinstance(parse_body(raw), dict)
    except RequestRefused as refused:
        assert refused.refusal.status == 400  # noqa: PT017  (either way is right)


@pytest.mark.parametrize(
    "raw",
    [b"{", b"\xff\xfe", b"[]", b'{"temperature": NaN}', b'{"a": Infinity}', b"[" * 100_000],
    ids=["cut", "not UTF-8", "list", "NaN", "infinity", "deep"],
)
def test_what_is_no_json_object(raw: bytes) -> None:
    """Bodies that are not a JSON object, NaN included, are refused with 400."""
    with pytest.raises(RequestRefused) as caught:
        parse_body(raw)
    assert caught.value.refusal.status == 400


def test_bodies_of_up_to_eight_mebibytes_are_read() -> None:
    """A longer one is refused with 413."""
    longest = b"{}".ljust(8 * 1024 * 1024)
    assert parse_body(longest) == {}
    with pytest.raises(RequestRefused) as caught:
        parse_body(longest + b" ")
    assert caught.value.refusal.status == 413


def test_unknown_model() -> None:
    """Another model's name is refused with 404 and OpenAI's code."""
    refusal = _refused({"model": "gpt-9", "prompt": "x"})
    assert (refusal.status, refusal.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "param",
    ["kv_transfer_params", "ec_transfer_params", "vllm_xargs", "request_id", "prompt_embeds"],
)
def test_unsupported_parameter(param: str) -> None:
    """Parameters that could forge a transfer or kill an engine are refused by name."""
    refusal = _refused({"prompt": "x", param: {"any": "thing"}})
    assert (refusal.status, refusal.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 65}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a", "b"], "n": 33}, "prompt"),
        ({"prompt": [[1], [2] * 100]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 178819910326]}, "prompt"),
        ({"prompt": [1.0, 178819910326.0]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 100}, "prompt"),
        ({"prompt": [1] * 100}, "prompt"),
        ({"prompt": [1] * 60, "max_tokens": 41}, "prompt"),
    ],
)
def test_what_cannot_be_answered(body: dict[str, object], param: str) -> None:
    """Requests that would hang, starve others or mislead are refused with the parameter."""
    refusal = _refused({"prompt": "x", **body})
    assert (refusal.status, refusal.param) == (400, param)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "system", "content": {}}],
        [{"role": "user", "content": "hi"}, {"role": "user", "content": 1}],
    ],
)
def test_what_is_no_conversation(messages: list[object]) -> None:
    """None at all, or content that cannot go to another process: 400 with the parameter."""
    refusal = _refused({"messages": messages}, "chat")
    assert (refusal.status, refusal.param) == (400, "messages")


def test_content_in_any_form() -> None:
    """Text, parts, and none where tools are called; what messages else hold the engine checks."""
    contents = ("hi", [{"type": "text", "text": "hi"}], None)
    messages = [{"role": "user", "content": content} for content in contents]
    given = {"messages": [*messages, {"role": "assistant"}, "not an object"]}
    assert check("chat", given, **LIMITS)["messages"] == given["messages"]


@pytest.mark.parametrize(
    ("prompt", "passed_on"),
    [("hi", "hi"), (["hi"], "hi"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([1.0], [1.0])],
)
def test_one_prompt_in_any_form(prompt: object, passed_on: object) -> None:
    """A single prompt passes, as text or tokens, in a list of one or not."""
    body = {"prompt": prompt, "max_tokens": 40}
    assert check("completions", body, **LIMITS)["prompt"] == passed_on


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"n": 2, "best_of": 2},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]], "n": 2},
        {"prompt_logprobs": 1},
        {"use_beam_search": True, "n": 2},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"n": 64},
        {"prompt": ["a"] * 64},
        {"prompt": ["a", "b"], "n": 32},
    ],
)
def test_what_decode_answers_alone_is_let_through(body: dict[str, object]) -> None:
    """Up to 64 answers, several prompts, and looks at the prompt are no reason to refuse."""
    given = {"prompt": "x", "max_tokens": 5, **body}
    assert check("completions", given, **LIMITS) == {**given, "model": "demo"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 60, "max_tokens": 40},
        {"prompt": [1] * 99, "max_tokens": 1},
        {"prompt": [1] * 99},
        {"prompt": [[1], [2] * 60], "max_tokens": 40},
    ],
)
def test_prompt_and_answer_may_fill_the_context(body: dict[str, object]) -> None:
    """A hundred tokens together are let through where the model has a context of a hundred."""
    assert check("completions", body, **LIMITS) == {**body, "model": "demo"}


def test_nothing_is_generated_only_with_echo() -> None:
    """`max_tokens` 0 is meant to show a prompt's log-probabilities, and nothing else."""
    assert _refused({"prompt": "x", "max_tokens": 0}).param == "max_tokens"
    chat = {"messages": HI, "echo": True, "max_tokens": 0}
    assert _refused(chat, "chat").param == "max_tokens"  # there echo is about the last message


@pytest.mark.parametrize(
    ("kind", "body", "passed_on"),
    [
        ("chat", {"messages": HI, "prompt": ["a", "b"]}, {"messages": HI}),
        ("chat", {"messages": HI, "prompt": [1] * 200}, {"messages": HI}),
        ("completions", {"prompt": "x", "messages": []}, {"prompt": "x"}),
        (
            "completions",
            {"prompt": "x", "max_tokens": 9, "max_completion_tokens": "one"},
            {"prompt": "x", "max_tokens": 9},
        ),
    ],
)
def test_fields_of_the_other_endpoint_are_left_out(
    kind: str, body: dict[str, object], passed_on: dict[str, object]
) -> None:
    """The engine does not read them, and so no process before it may."""
    assert check(kind, body, **LIMITS) == {**passed_on, "model": "demo"}


def test_the_length_that_the_engine_reads_is_compared() -> None:
    """Of a chat that names two, `max_completion_tokens`; both have to be numbers of tokens."""
    body = {"messages": HI, "max_tokens": 1, "max_completion_tokens": 50, "min_tokens": 40}
    assert check("chat", body, **LIMITS)["min_tokens"] == 40
    assert _refused({**body, "max_completion_tokens": 30}, "chat").param == "min_tokens"
    assert _refused({**body, "max_tokens": -1}, "chat").param == "max_tokens"


def test_the_model_may_be_left_out() -> None:
    """Without a model the only one there is is meant, and nothing else changes."""
    body = {"messages": HI, "temperature": 0.5}
    assert check("chat", body, **LIMITS) == {**body, "model": "demo"}


def test_refusal_is_shaped_as_openai_shapes_it() -> None:
    """A refusal's body holds message, type, param and code, and nothing else."""
    body = Refusal(status=400, message="m", param="p").body
    assert json.loads(json.dumps(body)) == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": None}
    }
    assert Refusal(status=503, message="m").body["error"]["type"] == "server_error"


@pytest.mark.parametrize(("seconds", "told"), [(0.2, "1"), (5.0, "5"), (5.1, "6")])
def test_retry_after_is_in_whole_seconds(seconds: float, told: str) -> None:
    """Retry-After is rounded up, and is there only where coming again may help."""
    assert Refusal(status=503, message="m", retry_after_s=seconds).headers == {"Retry-After": told}
    assert Refusal(status=400, message="m").headers == {}
