"""
The fields of a request's body and what each may be: pydantic models of both kinds of requests.

They refuse what vLLM 0.29 refuses (`vllm/entrypoints/openai/*/protocol.py`, `sampling_params.py`)
before a request takes a place, on simulated engines too, and name the field as clients wrote it.
They do not know what depends on an engine's settings: most log-probabilities, grammars, media.
tests/serving/request/test_schema.py compares them with vLLM's own classes.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

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
        found = {int(token): float(bias) for token, bias in given.items()}
    except (TypeError, ValueError, OverflowError):
        found = {-1: 0.0}
    if not all(token >= 0 and isfinite(bias) for token, bias in found.items()):
        raise ValueError("expected token ids, each with a number")
    return found


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
        found = {name: getattr(self, name) or [] for name in names}
        return found | {"logit_bias": list(self.logit_bias or ())}


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
        known = self.uuid is not None and self.type.endswith(MEDIA)
        if getattr(self, value) is None and not known:
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
