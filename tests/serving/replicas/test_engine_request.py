"""From bodies to vLLM's requests: what is refused, and that what passes can go anywhere."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from serving.protocol.messages import Refusal
from serving.request.cost import LENGTH_FIELDS
from serving.request.validation import IGNORED, check
from tests.serving.request_bodies import ACCEPTED, LIMITS, REFUSED, Body

TEXT = {"type": "text", "text": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


LIKE_AN_ENGINE = SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: LIMITS["vocab_size"])

STRICTER = {
    "repetition_penalty": "a tensor of 32 bits makes it 0 or infinite",
    "length_penalty": "beam search divides by length ** penalty, which fails",
    "thinking_token_budget": "its tensor has 32 bits",
    "n": "64 answers at most; true is no number",
    "best_of": "vLLM ignores it",
    "stream": "a text or a number is not true",
    "max_tokens": "an engine's prompt decides, and vLLM fails or cuts",
    "max_completion_tokens": "the same",
    "prompt": "the engine refuses empty ones and ids beyond its vocabulary, later",
    "model": "a name",
}
"""Parameters of which the endpoint refuses more than vLLM's request classes, and why."""

STRICTER_VALUES = [("top_k", "5"), ("stop_token_ids", ["1"]), ("min_tokens", True)]
"""And single values: a number as text, or true, could be any other one by mistake."""

STRICTER_CHATS: list[Any] = [
    [],
    [{"role": "user", "content": "hi"}, {"role": "user", "content": {}}],
]
"""No messages, or an object as content, in which pydantic sees an empty iterable."""


@pytest.fixture(scope="module")
def vllm() -> Any:  # noqa: ANN401
    """Return the module, whose imports take seconds and warn of themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from serving.replicas import vllm  # noqa: PLC0415
    return vllm


@pytest.mark.parametrize(("kind", "unnamed"), [("chat", None), ("completions", 16)])
def test_vllm_reads_what_the_endpoint_reads(vllm: Any, kind: str, unnamed: int | None) -> None:  # noqa: ANN401
    """Its own fields and none of the other endpoint's; a length that is not named is as long."""
    fields = vllm.SCHEMAS[kind].model_fields
    assert not set(IGNORED[kind]) & set(fields)
    assert {fields[name].default for name in LENGTH_FIELDS[kind]} == {unnamed}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [TEXT, 3]},
        {"role": "system", "content": [None, None]},
        {"role": "user", "content": [{"type": "text", "text": {}}]},
        {"role": "assistant", "content": [{"type": "text"}]},
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ],
)
def test_messages_that_are_none_are_named(vllm: Any, message: dict[str, object]) -> None:  # noqa: ANN401
    """A message that is none is refused at once, also where pydantic would look at it later."""
    refusal = vllm.engine_request("chat", {"model": "demo", "messages": [message]})
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert str(refusal.param).startswith("messages.")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "system", "content": [TEXT]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": [TEXT]},
    ],
)
def test_messages_stay_as_they_came(vllm: Any, message: dict[str, object]) -> None:  # noqa: ANN401
    """Nothing in them is read once and then gone."""
    request = vllm.engine_request("chat", {"model": "demo", "messages": [message]})
    prompt = vllm.for_prefill(request, keep=True)
    for _ in range(2):
        assert prompt.messages[0]["content"] == message["content"]


@pytest.mark.parametrize(
    ("code", "message", "param", "named"),
    [
        (400, "Invalid JSON grammar specification.", None, "structured_outputs"),
        (400, "top_k must be 0 or more.", "top_k", "top_k"),
        (500, "secret.py: KeyError", None, None),
    ],
)
def test_refusals_of_the_engine_name_a_field(
    vllm: Any,  # noqa: ANN401
    code: int,
    message: str,
    param: str | None,
    named: str | None,
) -> None:
    """Whether the engine named it or described it; a 5xx tells the client nothing of it."""
    error = SimpleNamespace(code=code, message=message, param=param)
    event = "data: " + json.dumps({"error": vars(error)}, separators=(",", ":"))
    for item in (SimpleNamespace(error=error), event):
        refusal = vllm.refusal_in(item)
        assert (refusal.status, refusal.param) == (code, named)
        assert (message in refusal.message) == (code == 400)
    for answer in (SimpleNamespace(usage=1), "data: 1"):
        assert vllm.refusal_in(answer) is None


def _refused(vllm: Any, kind: str, body: Body) -> bool:  # noqa: ANN401
    """Return whether vLLM refuses a body, as far as it needs no engine, or cannot pass it on."""
    request = vllm.engine_request(kind, body)
    if isinstance(request, Refusal):
        return True
    try:
        asked = request.to_sampling_params(4, {})
        for name in ("logprobs", "logit_bias", "stop_token_ids", "allowed_token_ids"):
            getattr(asked, f"_validate_{name}")(LIKE_AN_ENGINE)
        msgspec.msgpack.encode(asked)  # as it goes to the engine's process
    except (ValueError, OverflowError, vllm.VLLMClientError):
        return True
    return False


def test_what_the_endpoint_refuses_vllm_refuses_but_for_what_is_listed(vllm: Any) -> None:  # noqa: ANN401
    for kind, body, param in REFUSED:
        value = body.get(param)
        listed = param in STRICTER or (param, value) in STRICTER_VALUES or value in STRICTER_CHATS
        assert listed or _refused(vllm, kind, body), body


def test_what_the_endpoint_passes_on_vllm_takes(vllm: Any) -> None:  # noqa: ANN401
    """Nulls are gone, also those that vLLM refuses."""
    for kind, body in ACCEPTED:
        assert not _refused(vllm, kind, check(kind, body, **LIMITS)), body
