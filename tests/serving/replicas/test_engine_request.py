"""From bodies to vLLM's requests: what is refused, and that what passes can go anywhere."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from serving.protocol.messages import Refusal
from serving.request.length import LENGTH_FIELDS
from serving.request.validation import IGNORED

TEXT = {"type": "text", "text": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def vllm() -> Any:  # noqa: ANN401
    """Return the module, whose imports take seconds and warn of themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from serving.replicas import engine_request  # noqa: PLC0415
    return engine_request


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
