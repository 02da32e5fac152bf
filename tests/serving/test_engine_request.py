"""From bodies to vLLM's requests: what is refused, and that what passes can go anywhere."""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's and vLLM's own
    from serving.answer_length import LENGTHS, UNNAMED_TOKENS
    from serving.engine_request import SCHEMAS, engine_request, for_prefill, refusal_of
    from serving.requests import IGNORED, Refusal

TEXT = {"type": "text", "text": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_vllm_reads_what_the_door_reads(kind: str) -> None:
    """Its own fields and none of the other endpoint's; a length that is not named is as long."""
    fields = SCHEMAS[kind].model_fields
    assert not set(IGNORED[kind]) & set(fields)
    unnamed = {"chat": None, "completions": UNNAMED_TOKENS}[kind]
    assert {fields[name].default for name in LENGTHS[kind]} == {unnamed}


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
def test_messages_that_are_none_are_named(message: dict[str, object]) -> None:
    """Also where pydantic would look only when the content is read."""
    refusal = engine_request("chat", {"model": "demo", "messages": [message]})
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
def test_what_passes_goes_to_other_processes(message: dict[str, object]) -> None:
    """As it came: nothing in it is read once and then gone."""
    request = engine_request("chat", {"model": "demo", "messages": [message]})
    sent = pickle.loads(pickle.dumps(for_prefill(request)))  # noqa: S301  (our own)
    assert sent.messages == request.messages
    assert sent.messages[0]["content"] == message["content"]


@pytest.mark.parametrize(
    ("message", "param", "named"),
    [
        ("Invalid JSON grammar specification.", None, "structured_outputs"),
        ("top_k must be 0 or more.", "top_k", "top_k"),
    ],
)
def test_refusals_of_the_engine_name_a_field(message: str, param: str | None, named: str) -> None:
    """A refusal names the field at fault, whether the engine named it or described it."""
    error = SimpleNamespace(code=400, message=message, param=param)
    refusal = refusal_of(SimpleNamespace(error=error))
    assert (refusal.status, refusal.param) == (400, named)
    assert message in refusal.message


def test_what_went_wrong_inside_stays_inside() -> None:
    """A 5xx of the engine tells the client nothing of it."""
    error = SimpleNamespace(code=500, message="/root/secret.py: KeyError", param=None)
    refusal = refusal_of(SimpleNamespace(error=error))
    assert (refusal.status, "secret" in refusal.message) == (500, False)
