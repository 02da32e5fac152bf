"""
The fields of a request's body and what each may be, checked before it takes a place.

The models refuse what vLLM 0.29 refuses (`vllm/entrypoints/openai/*/protocol.py`,
`sampling_params.py`), on simulated engines too, and name the field as clients wrote it. They do not
know what depends on an engine's settings: most log-probabilities, grammars, media.
tests/serving/request/test_schema.py compares them with vLLM's own classes.
"""

from __future__ import annotations

import math
import re
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from serving.protocol.messages import refuse
from serving.request.cost import LENGTH_FIELDS, answer_tokens, prompts_of, requested_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pydantic_core import ErrorDetails


MAX_ANSWERS = 64
"""Most answers of one request, over all its prompts; each takes a place in the decode batch."""

MAX_STOPS, MAX_LOGPROB_IDS, MAX_SALT = 4, 128, 1024
"""vLLM's: stop texts, `logprob_token_ids`, and characters of a `cache_salt`."""

FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Least and greatest positive number of the tensors that penalties are in (normal float32)."""

INT32 = 2**31 - 1

INT64 = 2**63 - 1

LENGTH_EXPONENT = 32.0
"""
Most that beam search may be asked to weigh lengths by: it divides by length ** `length_penalty`,
which must be neither 0 nor infinite.
"""

MEDIA = ("_url", "_embeds")
"""Ends of types whose value an engine may know already, by its `uuid`."""

HARMLESS_NULL = frozenset({"assistant", "function"})
"""Roles whose messages may have null as content: calls have no text."""


def _no_text(value: object) -> object:
    """Refuse text in which pydantic, as vLLM, would find a number of any size."""
    if isinstance(value, str):
        raise ValueError("expected a whole number, not text")  # noqa: TRY004  (pydantic's)
    return value


def _biases(given: dict[str, Any]) -> dict[int, float]:
    """Return biases by token id; pydantic would report each of 30,000 that is none."""
    try:
        biases = {int(token): float(bias) for token, bias in given.items()}
    except (TypeError, ValueError, OverflowError):
        biases = {-1: 0.0}
    if not all(token >= 0 and isfinite(bias) for token, bias in biases.items()):
        raise ValueError("expected token ids, each with a number")
    return biases


Item = TypeVar("Item")

Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which one wrong item is enough: reports of 65,000 would take seconds."""

Integer = Annotated[int, BeforeValidator(_no_text)]

OrAll = Annotated[Integer, Field(ge=-1)]

Text = Annotated[StrictStr, Field(min_length=1)]

TokenId = Annotated[Integer, Field(ge=0)]

Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Model(BaseModel, hide_input_in_errors=True):
    """Reads what it knows, and leaves all other fields to the engine."""


class StreamOptions(_Model):
    """Options of a stream."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class RepetitionDetection(_Model):
    """When an answer that repeats itself ends."""

    max_pattern_size: Annotated[Integer, Field(ge=0, le=INT32)] = 0
    min_pattern_size: Annotated[Integer, Field(ge=0, le=INT32)] = 0
    min_count: Annotated[Integer, Field(ge=0, le=INT32)] = 0

    @model_validator(mode="after")
    def _is_a_pattern(self) -> RepetitionDetection:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("expected min_pattern_size up to max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:  # noqa: PLR2004
            raise ValueError("expected min_count, at least 2")
        return self


class ResponseFormat(_Model):
    """The form of an answer; its schema is for the engine's compiler."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("expected json_schema beside this type")
        return self


class Fields(_Model):
    """Fields of both kinds of requests. An absent one is `None`: nulls are left out before."""

    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_ANSWERS)] | None = None
    best_of: StrictInt | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: OrAll | None = None
    seed: Annotated[Integer, Field(ge=-INT64 - 1, le=INT64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=FLOAT32[0], le=FLOAT32[1])] | None = None
    length_penalty: Annotated[float, Field(ge=-LENGTH_EXPONENT, le=LENGTH_EXPONENT)] | None = None
    use_beam_search: bool | None = None
    stop: Text | Annotated[Many[Text], Field(max_length=MAX_STOPS)] | None = None
    bad_words: Many[Text] | None = None
    stop_token_ids: Many[TokenId] | None = None
    allowed_token_ids: Annotated[Many[TokenId], Field(min_length=1)] | None = None
    logprob_token_ids: Annotated[Many[TokenId], Field(max_length=MAX_LOGPROB_IDS)] | None = None
    logit_bias: Annotated[dict[str, Any], AfterValidator(_biases)] | None = None
    prompt_logprobs: OrAll | None = None
    priority: Annotated[Integer, Field(ge=-INT64 - 1, le=INT64)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    truncate_prompt_tokens: Annotated[OrAll, Field(le=INT64)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    thinking_token_budget: Annotated[StrictInt, Field(ge=-1, le=INT32)] | None = None
    routed_experts_prompt_start: Annotated[Integer, Field(ge=0)] | None = None
    stream_interval: Annotated[Integer, Field(ge=1)] | None = None
    repetition_detection: RepetitionDetection | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Annotated[Text, Field(max_length=MAX_SALT)] | None = None
    session_id: StrictStr | None = None
    user: StrictStr | None = None

    @property
    def token_ids(self) -> dict[str, list[int]]:
        """The token ids that each field has, if any."""
        names = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
        ids = {name: getattr(self, name) or [] for name in names}
        return ids | {"logit_bias": list(self.logit_bias or ())}


class Completion(Fields):
    """A completion; its prompt is checked apart, because it may have a million ids."""

    echo: bool | None = None
    logprobs: OrAll | None = None
    suffix: StrictStr | None = None


class Part(_Model):
    """A part of a message's content: its value is in the field that its type names."""

    type: StrictStr | None = None
    text: StrictStr | None = None
    refusal: StrictStr | None = None
    thinking: StrictStr | None = None
    image_url: StrictStr | dict[str, Any] | None = None
    audio_url: StrictStr | dict[str, Any] | None = None
    video_url: StrictStr | dict[str, Any] | None = None
    input_audio: dict[str, Any] | None = None
    image_embeds: StrictStr | dict[str, StrictStr] | None = None
    audio_embeds: StrictStr | dict[str, StrictStr] | None = None
    video_embeds: StrictStr | dict[str, StrictStr] | None = None
    name: StrictStr | None = None
    uuid: StrictStr | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> Part:
        if self.type is None:
            if self.image_url is None and self.audio_url is None and self.video_url is None:
                raise ValueError("expected a type")
            return self
        value = "name" if self.type == "tool_reference" else self.type
        if value not in type(self).model_fields or self.type in {"name", "type", "uuid"}:
            raise ValueError("expected type text, or another one that engines know")
        is_known = self.uuid is not None and self.type.endswith(MEDIA)
        if getattr(self, value) is None and not is_known:
            raise ValueError(f"expected {value} in a part of type {self.type}")
        return self


class CalledFunction(_Model):
    """The function of a call, and its arguments as text."""

    name: StrictStr
    arguments: StrictStr


class ToolCall(_Model):
    """A call of an earlier answer."""

    id: StrictStr
    type: Literal["function"]
    function: CalledFunction


class Message(_Model):
    """A message of a chat."""

    role: Text
    content: StrictStr | Many[Part] | None = None
    name: StrictStr | None = None
    tool_call_id: StrictStr | None = None
    tool_calls: Many[ToolCall] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        null = "content" in self.model_fields_set and self.content is None
        if null and self.role not in HARMLESS_NULL:
            raise ValueError("expected content: a text, or a list of parts")
        return self


class Function(_Model):
    """A function that a model may call."""

    name: Text
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Model):
    """A tool that a model may call."""

    type: Literal["function"] = "function"
    function: Function


class Chat(Fields):
    """A chat."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: OrAll | None = None
    tools: Annotated[Many[Tool], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Many[dict[str, StrictStr]] | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


KINDS: dict[str, type[Completion | Chat]] = {"completions": Completion, "chat": Chat}
"""The model of each kind of requests."""

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

TOKEN_IDS = 2**31
"""Upper bound of token ids: vLLM's tokenizers fail on ids beyond 32 bits (`echo`)."""

PROMPT = "a string, a list of token ids, or a list of either, none of them empty"

CONTAINERS = frozenset({dict, list})
"""Those of JSON."""

INTEGERS = range(-(2**63), 2**64)
"""Those of msgpack, by which vLLM's processes talk."""

SHOWN_CHARACTERS = 64
"""Most characters of a client's own name that a message repeats."""

WORDS = (
    (r"^Value error, ", ""),
    (r"^(Input|String|List) should ", "must "),
    (r"^Field required$", "expected a value"),
    (r"a valid dictionary( or instance of \w+)?", "an object"),
    (r" after validation", ""),
)
"""What stands in place of pydantic's words for what clients do not know."""


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
        body = from_json(raw)
    except ValueError as error:
        refuse(400, f"The body is not valid JSON: {error}")
    if not isinstance(body, dict):
        refuse(400, "The body is not a JSON object.")
    _check_levels(body)
    for name, value in body.items():
        param = name[:SHOWN_CHARACTERS]
        if _has([value], _not_finite):
            message = f"The body is not valid JSON: {param} has a number that is out of range."
            refuse(400, message, param=param)
        if name != "prompt" and _has([value], _beyond_64_bits):  # its ids have closer bounds
            _refuse(param, "integers of at most 64 bits")
    return body


def _has(values: Collection[Any], wrong: Callable[[Collection[Any]], bool]) -> bool:
    return wrong(values) or any(
        _has(container.values() if isinstance(container, dict) else container, wrong)
        for container in _containers(values)
    )


def _containers(values: Collection[Any]) -> list[Any]:
    """Return the lists and objects among values; of a million ids it looks at their types only."""
    if CONTAINERS.isdisjoint(map(type, values)):
        return []
    return [value for value in values if type(value) in CONTAINERS]


def _beyond_64_bits(values: Collection[Any]) -> bool:
    numbers = [value for value in values if isinstance(value, int)]
    return bool(numbers) and not (min(numbers) in INTEGERS and max(numbers) in INTEGERS)


def _not_finite(values: Collection[Any]) -> bool:
    kinds = set(map(type, values))
    return float in kinds and not all(math.isfinite(e) for e in values if isinstance(e, float))


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
    level: list[Any] = [body]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            refuse(400, f"The body is nested too deeply: at most {MAX_DEPTH} levels.")
        inner: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            inner += _containers(values)
        level = inner


def check(
    kind: str,
    body: dict[str, Any],
    *,
    models: Sequence[str],
    max_model_len: int,
    vocab_size: int = TOKEN_IDS,
) -> dict[str, Any]:
    """
    Refuse what cannot be answered correctly; return the body to pass on, without nulls.

    A field that is null means what an absent one does, also in messages; but `model` is a name, or
    absent. What depends on an engine's settings the engine checks.

    Args:
        kind: `chat` or `completions`.
        body: parsed request.
        models: served names, the model's first, which a request without one means.
        max_model_len: tokens of prompt and answer together.
        vocab_size: bound of token ids.

    Raises:
        RequestRefused: with the parameter at fault.
    """
    model = body.get("model", models[0])
    check_model(model, models)
    checked = {**_without_nulls(kind, body), "model": model}
    for param, expectation in UNSUPPORTED.items():
        if param in checked:
            _refuse(param, expectation)
    fields = _fields(kind, checked)
    _check_together(fields, checked)
    for param, ids in fields.token_ids.items():
        if ids and max(ids) >= vocab_size:
            _refuse(param, f"token ids from 0 to {vocab_size - 1}")
    if kind == "completions":
        checked["prompt"] = _prompt(checked.get("prompt"), min(vocab_size, TOKEN_IDS))
    _check_answers(checked)
    _check_lengths(kind, checked, max_model_len)
    return checked


def check_model(model: object, models: Sequence[str]) -> None:
    """Refuse every name but those that are served."""
    if model in models:
        return
    shown = repr(model[:SHOWN_CHARACTERS]) if isinstance(model, str) else "that is no text"
    served = ", ".join(map(repr, models))
    message = f"The model {shown} does not exist; this endpoint serves {served}."
    refuse(404, message, param="model", code="model_not_found")


def _without_nulls(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out fields of the other kind, nulls, and nulls in messages but for their content."""
    kept = {
        name: value
        for name, value in body.items()
        if value is not None and name not in IGNORED[kind]
    }
    if isinstance(kept.get("messages"), list):
        kept["messages"] = [
            {
                name: value
                for name, value in message.items()
                if value is not None or name == "content"
            }
            if isinstance(message, dict)
            else message
            for message in kept["messages"]
        ]
    return kept


def _fields(kind: str, body: Mapping[str, Any]) -> Fields:
    fields = {name: value for name, value in body.items() if name != "prompt"}
    try:
        return KINDS[kind].model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        param = str(errors[0]["loc"][0])
        # Of what a value may be instead, what it is most like.
        of_param = [detail for detail in errors if detail["loc"][0] == param]
        worst = max(of_param, key=lambda detail: len(detail["loc"]))
        what = worst["msg"]
        for theirs, ours in WORDS:
            what = re.sub(theirs, ours, what)
        refuse(400, f"{_place(worst, fields)}: {what}.", param=param, code="unsupported_value")


def _place(error: ErrorDetails, body: object) -> str:
    """Return where in *body* an error is, as clients write it: `messages[0].content[1].text`."""
    place, value = "", body
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(value, list):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            place, value = f"{place}.{str(part)[:SHOWN_CHARACTERS]}", value[part]
    if error["type"] == "missing":
        place += f".{error['loc'][-1]}"
    return place.removeprefix(".")


def _check_together(fields: Fields, body: Mapping[str, Any]) -> None:
    if body.get("stream_options") and not fields.stream:
        _refuse("stream_options", "nothing where `stream` is not true")
    if fields.prompt_logprobs and fields.stream:
        _refuse("prompt_logprobs", "nothing where `stream` is true")
    if fields.logprob_token_ids and (body.get("logprobs", False) is False):
        _refuse("logprob_token_ids", "`logprobs` beside it")
    if not isinstance(fields, Chat):
        return
    if fields.top_logprobs and not fields.logprobs:
        _refuse("top_logprobs", "`logprobs` to be true beside it")
    if fields.tool_choice not in (None, "none") and not fields.tools:
        _refuse("tool_choice", "`tools` beside it")
    if fields.continue_final_message and fields.add_generation_prompt:
        _refuse("continue_final_message", "`add_generation_prompt` to be false beside it")


def _check_answers(body: dict[str, Any]) -> None:
    n, prompts = body.get("n", 1), len(prompts_of(body.get("prompt")))
    if body.get("best_of", n) != n:
        _refuse("best_of", f"n = {n}: the engine does not choose among answers")
    if n * prompts > MAX_ANSWERS:
        _refuse("prompt", f"at most {MAX_ANSWERS} answers a request, not {n * prompts}")


def _prompt(prompt: object, vocab_size: int) -> object:
    prompts = prompts_of(prompt)
    if all(isinstance(one, list) for one in prompts):
        prompts = [_token_ids(one, vocab_size) for one in prompts]
    elif not all(isinstance(one, str) and one for one in prompts):
        _refuse("prompt", PROMPT)
    return prompts[0] if len(prompts) == 1 else prompts


def _token_ids(prompt: list[Any], vocab_size: int) -> list[int]:
    """Return the token ids of a prompt; engines take 1.0 for 1."""
    kinds = set(map(type, prompt))
    if not prompt or not kinds <= {int, bool, float}:
        _refuse("prompt", PROMPT)
    ids = [int(value) for value in prompt] if float in kinds else prompt
    if ids != prompt or min(ids) < 0 or max(ids) >= vocab_size:
        _refuse("prompt", f"token ids, whole numbers from 0 to {vocab_size - 1}")
    return ids


def _check_lengths(kind: str, body: dict[str, Any], max_model_len: int) -> None:
    """Refuse lengths that decode would refuse after prefill has computed the prompt."""
    least = 0 if kind == "completions" and body.get("echo") else 1
    for name in LENGTH_FIELDS[kind]:
        if body.get(name, least) < least:
            _refuse(name, f"a whole number, at least {least}")
    requested, longest = requested_tokens(kind, body), answer_tokens(kind, body)
    most_tokens = max_model_len if longest is None else longest
    if body.get("min_tokens", 0) > most_tokens:
        _refuse("min_tokens", f"at most {most_tokens}, the most tokens of the answer")
    wanted = max(requested or 1, 1)
    tokens = max(len(p) if isinstance(p, list) else 1 for p in prompts_of(body.get("prompt")))
    if tokens + wanted > max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens; the request has at "
            f"least {tokens} in the prompt and asks for {wanted} more."
        )
        length = next((name for name in LENGTH_FIELDS[kind] if name in body), "prompt")
        param = length if wanted > max_model_len else "prompt"
        refuse(400, message, param=param, code="context_length_exceeded")


def _refuse(param: str, expectation: str) -> NoReturn:
    refuse(400, f"{param}: expected {expectation}.", param=param, code="unsupported_value")
