"""What the endpoint refuses, and how it says so: pure functions of the request's body."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from serving.protocol.refusal import Refusal
from serving.request.answer_length import LENGTHS, named_tokens
from serving.request.prompt_length import prompts_of

MAX_BODY_BYTES = 8 << 20
"""Longer bodies are refused: a prompt of two million tokens."""

UNSUPPORTED = {
    "kv_transfer_params": "no such parameter: the server alone says where KV comes from",
    "ec_transfer_params": "no such parameter: the server alone says where embeddings come from",
    "vllm_xargs": "no such parameter: transfers could be forged with it",
    "request_id": "no such parameter: the server names its requests",
    "prompt_embeds": "a prompt of text or token ids",
}
"""Parameters that would forge a KV transfer, or that nobody here can use."""

IGNORED = {"chat": ("prompt",), "completions": ("messages", "max_completion_tokens")}
"""By endpoint, the fields of the other one: the engine does not read them, and nobody else may."""

MAX_ANSWERS = 64
"""Of one request, all its prompts together; each takes a place in the decode batch."""

TOKEN_IDS = 2**31
"""More than any vocabulary has; tokenizers fail on what 32 bits do not hold (vLLM's echo)."""


class RequestRefused(Exception):
    """Carries a refusal up to where it is answered."""

    def __init__(self, refusal: Refusal) -> None:
        """Keep the refusal."""
        super().__init__(refusal.message)
        self.refusal = refusal


def parse_body(raw: bytes) -> dict[str, Any]:
    """
    Read the body of a request.

    Raises:
        Refused: not JSON, not an object, too long or too deep.
    """
    if len(raw) > MAX_BODY_BYTES:
        raise RequestRefused(
            Refusal(status=413, message=f"The body exceeds {MAX_BODY_BYTES} bytes.")
        )
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise RequestRefused(
            Refusal(status=400, message="The body is nested too deeply.")
        ) from None
    except ValueError as error:
        message = f"The body is not valid JSON: {error}"
        raise RequestRefused(Refusal(status=400, message=message)) from None
    if not isinstance(body, dict):
        raise RequestRefused(Refusal(status=400, message="The body is not a JSON object."))
    return body


def _no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no JSON number")


def check(kind: str, body: dict[str, Any], *, model_id: str, max_model_len: int) -> dict[str, Any]:
    """
    Refuse what cannot be answered correctly; return the body to pass on.

    Parameters of every other kind are checked by the engine.

    Args:
        kind: `chat` or `completions`.
        body: parsed request.
        model_id: the one model that is served.
        max_model_len: tokens of prompt and answer together.

    Raises:
        Refused: with the parameter at fault.
    """
    check_model(body.get("model", model_id), model_id)
    _check_supported(body)
    checked = {name: value for name, value in body.items() if name not in IGNORED[kind]}
    checked["model"] = model_id
    if kind == "chat":
        _check_messages(body.get("messages"))
    elif "prompt" in body:
        checked["prompt"] = _prompt(body["prompt"])
    _check_answers(checked)
    _check_lengths(kind, checked, max_model_len)
    return checked


def check_model(model: object, model_id: str) -> None:
    """Refuse every model but the one that is served."""
    if model != model_id:
        message = f"The model {model!r} does not exist; this endpoint serves {model_id!r}."
        raise RequestRefused(
            Refusal(status=404, message=message, param="model", code="model_not_found")
        )


def _check_supported(body: dict[str, Any]) -> None:
    """Refuse what would forge a KV transfer."""
    for param, expectation in UNSUPPORTED.items():
        if body.get(param) is not None:
            _refuse(param, expectation)


def _check_answers(body: dict[str, Any]) -> None:
    """Refuse more answers than one request may have, and a choice among them."""
    n = body.get("n")
    if n is None:
        n = 1
    if not _is_count(n) or n < 1:
        _refuse("n", "a whole number, at least 1")
    if body.get("best_of") not in (None, n):
        _refuse("best_of", f"n = {n}: the engine does not choose among answers")
    prompts = len(prompts_of(body.get("prompt")))
    if n * prompts > MAX_ANSWERS:
        param = "n" if prompts == 1 else "prompt"
        _refuse(param, f"at most {MAX_ANSWERS} answers a request, not {n * prompts}")


def _check_messages(messages: object) -> None:
    """
    Refuse a conversation without a message, and content that is no content.

    vLLM's classes let any iterable pass for content, an object too, and read it when it is used:
    the request could then not be sent to another process (pydantic's `ValidatorIterator`).
    """
    if messages == []:
        _refuse("messages", "at least one message")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str | list | None):
            _refuse("messages", "as content of a message a string, a list of parts, or null")


def _prompt(prompt: object) -> object:
    """Return a prompt, or several as they are; out of a list of one, that one."""
    if prompt == []:
        _refuse("prompt", "a string, a list of token ids, or a list of either")
    prompts = prompts_of(prompt)
    numbers = (n for each in prompts for n in (each if isinstance(each, list) else [each]))
    if any(isinstance(n, int | float) and not n < TOKEN_IDS for n in numbers):
        _refuse("prompt", f"token ids below {TOKEN_IDS}")
    return prompts[0] if len(prompts) == 1 else prompt


def _check_lengths(kind: str, body: dict[str, Any], max_model_len: int) -> None:
    """Refuse lengths that decode would refuse after prefill has done its work."""
    least = 0 if kind == "completions" and body.get("echo") else 1
    for name in LENGTHS[kind]:
        given = body.get(name)
        if given is not None and (not _is_count(given) or given < least):
            _refuse(name, f"a whole number, at least {least}")
    at_least, named = body.get("min_tokens") or 0, named_tokens(kind, body)
    if not _is_count(at_least):
        _refuse("min_tokens", "a whole number, at least 0")
    if named is not None and at_least > named:
        _refuse("min_tokens", f"at most {named}, the most tokens of the answer")
    wanted = max(named or 1, 1)
    tokens = max(len(p) if isinstance(p, list) else 1 for p in prompts_of(body.get("prompt")))
    if tokens + wanted > max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens; the request has at "
            f"least {tokens} in the prompt and asks for {wanted} more."
        )
        code = "context_length_exceeded"
        raise RequestRefused(Refusal(status=400, message=message, param="prompt", code=code))


def _is_count(value: object) -> bool:
    """Tell a whole number, zero or more, from everything else, True included."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse(param: str, expectation: str) -> NoReturn:
    """Refuse a parameter."""
    message = f"{param}: expected {expectation}."
    raise RequestRefused(
        Refusal(status=400, message=message, param=param, code="unsupported_value")
    )
