"""The checks of a request's body, each with its refusal: pure functions."""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic_core import from_json

from serving.protocol.messages import refuse
from serving.request.length import LENGTH_FIELDS, prompts_of, requested_tokens, texts_in

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MAX_DEPTH = 64
"""Most levels of a body: pickle, templates and schemas recurse over it."""

MAX_PARTS = 65_536
"""Most strings, and most lists and objects, of a body: 20 ms of the parser."""

UNSUPPORTED = {
    "kv_transfer_params": "no such parameter: the server alone says where KV comes from",
    "ec_transfer_params": "no such parameter: the server alone says where embeddings come from",
    "vllm_xargs": "no such parameter: transfers could be forged with it",
    "request_id": "no such parameter: the server names its requests",
    "prompt_embeds": "a prompt of text or token ids",
}
"""Parameters that would forge a KV transfer, or that this deployment cannot serve."""

IGNORED = {"chat": ("prompt",), "completions": ("messages", "max_completion_tokens")}
"""By endpoint, the fields of the other endpoint: the engine ignores them, and so do we."""

MAX_ANSWERS = 64
"""Most answers of one request, over all its prompts; each takes a place in the decode batch."""

TOKEN_IDS = 2**31
"""Upper bound of token ids: vLLM's tokenizers fail on ids beyond 32 bits (`echo`)."""

PROMPT = "a string, a list of token ids, or a list of either"

INTEGERS = range(-(2**63), 2**64)
"""Those of msgpack, by which vLLM's processes talk."""

INTEGER_FIELDS = (
    *("top_k", "stop_token_ids", "thinking_token_budget", "repetition_detection"),
    "routed_experts_prompt_start",
)
"""Fields in which vLLM takes text for an integer, of any size."""

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def parse_body(raw: bytes, max_model_len: int) -> dict[str, Any]:
    """
    Read the body of a request for a model with this context, in tokens.

    Raises:
        RequestRefused: 400 for a body that is not a JSON object, that takes long to parse (very
            many values), or that no process could pass on: deep nesting, half of a surrogate pair,
            a number beyond a float's range, or an integer beyond 64 bits.
    """
    _refuse_many_values(raw, MAX_PARTS + 2 * max_model_len)
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        refuse(400, f"The body is not valid JSON: {error}")
    if not isinstance(body, dict):
        refuse(400, "The body is not a JSON object.")
    _check_levels(body)
    for name, value in body.items():
        if name != "prompt" and _has_beyond([value]):  # its ids have closer bounds
            _refuse(name[:64], "integers of at most 64 bits")
    return body


def _has_beyond(values: Collection[Any]) -> bool:
    """Tell whether an integer beyond `INTEGERS` is among values, or inside them."""
    numbers = [each for each in values if isinstance(each, int)]
    if numbers and not (min(numbers) in INTEGERS and max(numbers) in INTEGERS):
        return True
    inner = [each for each in values if isinstance(each, dict | list)]
    return any(_has_beyond(each.values() if isinstance(each, dict) else each) for each in inner)


def _refuse_many_values(raw: bytes, most_values: int) -> None:
    """
    Refuse a body whose parts are too many, before it is parsed.

    The parser keeps Python's lock, and 16 MB of empty lists are more than a second of it.
    """
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings <= MAX_PARTS:
        outside = b"".join(plain.split(b'"')[::2])
        containers = outside.count(b"[") + outside.count(b"{")
        if containers <= MAX_PARTS and outside.count(b",") <= most_values:
            return
    message = (
        f"The body has too many parts: at most {MAX_PARTS} strings, {MAX_PARTS} lists and objects, "
        f"and {most_values} values."
    )
    refuse(400, message, code="too_many_parts")


def _check_levels(body: dict[str, Any]) -> None:
    """Refuse deep nesting and infinite numbers, without recursion."""
    level: list[Any] = [body]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            refuse(400, f"The body is nested too deeply: at most {MAX_DEPTH} levels.")
        inner: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            if math.inf in values or -math.inf in values:
                refuse(400, "The body is not valid JSON: a number is out of range.")
            inner += [each for each in values if isinstance(each, dict | list)]
        level = inner


def check(
    kind: str, body: dict[str, Any], *, models: Sequence[str], max_model_len: int
) -> dict[str, Any]:
    """
    Refuse what cannot be answered correctly; return the body to pass on.

    The engine checks all other parameters.

    Args:
        kind: `chat` or `completions`.
        body: parsed request.
        models: names that are served: the model's, which a request without one means, and those
            of its adapters.
        max_model_len: tokens of prompt and answer together.

    Raises:
        RequestRefused: with the parameter at fault.
    """
    model = body.get("model", models[0])
    check_model(model, models)
    for param, expectation in UNSUPPORTED.items():
        if body.get(param) is not None:
            _refuse(param, expectation)
    for param in INTEGER_FIELDS:
        if any(True for _ in texts_in(body.get(param))):
            _refuse(param, "integers, not text")
    _check_stream(body)
    checked = {name: value for name, value in body.items() if name not in IGNORED[kind]}
    checked["model"] = model
    if kind == "chat":
        _check_messages(body.get("messages"))
    elif "prompt" in body:
        checked["prompt"] = _prompt(body["prompt"])
    _check_answers(checked)
    _check_lengths(kind, checked, max_model_len)
    return checked


def check_model(model: object, models: Sequence[str]) -> None:
    """Refuse every name but those that are served."""
    if model not in models:
        served = ", ".join(map(repr, models))
        message = f"The model {model!r} does not exist; this endpoint serves {served}."
        refuse(404, message, param="model", code="model_not_found")


def _check_stream(body: Mapping[str, Any]) -> None:
    """Refuse a choice of streaming that is none, and options of a stream where there is none."""
    stream, options = body.get("stream"), body.get("stream_options")
    if not isinstance(stream, bool | None):
        _refuse("stream", "true or false")
    if not isinstance(options, dict | None):
        _refuse("stream_options", "an object")
    if not all(isinstance((options or {}).get(name), bool | None) for name in STREAM_OPTIONS):
        _refuse("stream_options", "true or false for each of " + ", ".join(STREAM_OPTIONS))
    if options and not stream:
        _refuse("stream_options", "nothing where `stream` is not true")


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
    Refuse what is no conversation of at least one message, and content that is no content.

    vLLM's classes accept any iterable as content, an object too, and read it when it is used:
    the request could then not be sent to another process (pydantic's `ValidatorIterator`).
    """
    if not isinstance(messages, list) or not messages:
        _refuse("messages", "a list of at least one message")
    for message in messages:
        if not isinstance(message, dict):
            _refuse("messages", "a list of objects")
        if not isinstance(message.get("content"), str | list | None):
            _refuse("messages", "as content of a message a string, a list of parts, or null")


def _prompt(prompt: object) -> object:
    """Return one or several prompts as they are; a list of one prompt becomes that prompt."""
    prompts = prompts_of(prompt)
    if all(isinstance(each, list) for each in prompts):
        prompts = [_token_ids(each) for each in prompts]
    elif not all(isinstance(each, str) for each in prompts) and prompt is not None:
        _refuse("prompt", PROMPT)
    return prompts[0] if len(prompts) == 1 else prompts


def _token_ids(prompt: list[Any]) -> list[int]:
    """Return the token ids of a prompt; engines take 1.0 for 1."""
    kinds = set(map(type, prompt))
    if not prompt or not kinds <= {int, bool, float}:
        _refuse("prompt", PROMPT)
    ids = [int(each) for each in prompt] if float in kinds else prompt
    if ids != prompt or min(ids) < 0 or max(ids) >= TOKEN_IDS:
        _refuse("prompt", f"token ids, whole numbers from 0 to {TOKEN_IDS - 1}")
    return ids


def _check_lengths(kind: str, body: dict[str, Any], max_model_len: int) -> None:
    """Refuse lengths that decode would refuse after prefill has computed the prompt."""
    least = 0 if kind == "completions" and body.get("echo") else 1
    for name in LENGTH_FIELDS[kind]:
        value = body.get(name)
        if value is not None and (not _is_count(value) or value < least):
            _refuse(name, f"a whole number, at least {least}")
    at_least, requested = body.get("min_tokens") or 0, requested_tokens(kind, body)
    if not _is_count(at_least):
        _refuse("min_tokens", "a whole number, at least 0")
    if requested is not None and at_least > requested:
        _refuse("min_tokens", f"at most {requested}, the most tokens of the answer")
    wanted = max(requested or 1, 1)
    tokens = max(len(p) if isinstance(p, list) else 1 for p in prompts_of(body.get("prompt")))
    if tokens + wanted > max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens; the request has at "
            f"least {tokens} in the prompt and asks for {wanted} more."
        )
        refuse(400, message, param="prompt", code="context_length_exceeded")


def engine_request_id(body: Mapping[str, Any]) -> str:
    """
    Return the id of a request for one engine: the endpoint's, made unique.

    Clients may use an id twice, and each attempt of a request is one of its own for its engine.
    """
    return f"{body.get('request_id', 'req')}-{uuid.uuid4().hex[:16]}"


def _is_count(value: object) -> bool:
    """Tell a whole number, zero or more, from everything else, True included."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse(param: str, expectation: str) -> NoReturn:
    refuse(400, f"{param}: expected {expectation}.", param=param, code="unsupported_value")
