"""
Bodies that the endpoint takes and refuses, for whatever engine.

They are of a model of 100 tokens of context and 1,000 of vocabulary, named `demo`.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]
LIMITS: Body = {"models": ("demo",), "max_model_len": 100, "vocab_size": 1000}

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
NUMBERS = (-(2**63) - 1, 2**64, 10**40, "x", "", [], {}, [1], {"a": 1})
"""What no numeric field takes."""

OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, -1, 2.1, 1e300),
    "top_p": (0, -0.5, 1.01),
    "min_p": (-0.1, 1.5),
    "presence_penalty": (-2.5, 2.5),
    "frequency_penalty": (-3, 1e300),
    "repetition_penalty": (0, -1, 1e-300, 1e300),
    "length_penalty": (-400.0, 1e300),
    "top_k": (-2, 0.5, "5"),
    "seed": (2**63, 1.5),
    "min_tokens": (-1, 5, 1.5, 2**31, True),
    "max_tokens": (0, -1, 1.5, 101, 2**31, 2**63, True),
    "n": (0, -1, 65, 1.5, 2**31, True),
    "prompt_logprobs": (-2, 0.5),
    "priority": (2**63, 0.5),
    "truncate_prompt_tokens": (-2, 2**63),
    "thinking_token_budget": (-2, 1.0, 2**63, "5"),
    "stream_interval": (0, -1),
    "routed_experts_prompt_start": (-1,),
}
"""Values of fields of both endpoints, beside `NUMBERS`; `max_tokens` is 4."""

OTHERS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("stop_token_ids", ([-1], [1000], [2**31], [2**63], ["1"], [None], [[1]], 1, "1", {}, [1.5])),
    ("allowed_token_ids", ([], [1, 1000], [-1], ["a"], 5)),
    ("logprob_token_ids", ([1],)),  # without logprobs
    ("logit_bias", ({"a": 1}, {"-1": 1}, {"1000": 1}, {"9" * 20: 1}, {"1.5": 1}, {"1": "x"})),
    ("logit_bias", ({"1": None}, [], "x", 5)),
    ("stop", ("", [""], [1], 1, {}, [None], ["a"] * 5, True)),
    ("bad_words", ([""], "x", [1], {})),
    ("stream", (1, 0, "true", "", [])),
    ("stream_options", ({"include_usage": True}, {"include_usage": False}, {"x": 1}, "a", [1], 5)),
    ("ignore_eos", (2, "x", [], {})),
    ("use_beam_search", ("x", [])),
    ("user", (1, [], {}, True)),
    ("cache_salt", ("", "x" * 1025, 5, ["a"])),
    ("truncation_side", ("up", 1)),
    ("response_format", ("x", [], {}, {"type": "x"}, {"type": "json_schema"})),
    ("structured_outputs", ("x", [1], 5)),
    ("repetition_detection", ("x", {"max_pattern_size": 3}, {"min_pattern_size": 1})),
    ("repetition_detection", ({"max_pattern_size": "9" * 20, "min_count": 2},)),
    ("best_of", (2, 0, "x", {})),
)
"""Other values of fields of both endpoints."""

OF_CHATS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("max_completion_tokens", (0, -1, "5", True, 2**63)),
    ("logprobs", (5, "x", [])),
    ("top_logprobs", (-2, 3, "x")),
    ("tools", ([], [1], [{}], {}, "x", [{"type": "x", **TOOL, "function": {"name": 1}}])),
    ("tool_choice", ("auto", "required", "x", 1, {"type": "function"})),
    ("reasoning_effort", ("x", 1)),
    ("documents", ("x", [1], [{"a": 1}])),
    ("chat_template", (1, [])),
    ("chat_template_kwargs", ("x", [])),
    ("messages", ([], {}, "hi", 5, [1], [None], [[]], ["hi"], [{}], [*HI, 1])),
)

OF_COMPLETIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("prompt", ("", [], [[]], [""], ["a", ""], [None], ["a", None], [[[1]]], {}, [{}])),
    ("prompt", ([1, 2.5], [1, "a"], [1, None], [[1, "a"]], [[1], 2], [[1], "a"], ["a", [1]])),
    ("prompt", ([-1], [1000], [[1], [1000]], [2**31], [2**63], [-(2**63) - 1], [1, [2]])),
    ("prompt", ([1.5, 2.5], 5, False, True, 1.5, [[1], []], [["a"]], [1e300], [0, -0.5])),
    ("logprobs", (-2, "x", [], {})),
    ("echo", ("x", 2)),
    ("suffix", (1, [])),
)

CONTENTS: tuple[Any, ...] = (
    *(None, 1, 1.5, True, {}, {"type": "text", "text": "x"}, [1], [None], ["x"], [["x"]], [{}]),
    *([{"type": "text"}], [{"type": "text", "text": 1}], [{"type": "text", "text": None}]),
    *([{"text": "x"}], [{"type": "nope", "nope": 1}], [{"type": 1}], [{"type": []}]),
    *([{"type": "image_url"}], [{"type": "image_url", "image_url": 5}], [{"type": "name"}]),
)
"""Contents that no user's message has."""

MESSAGES: tuple[Body, ...] = (
    *({"role": "user", "content": each} for each in CONTENTS),
    *({"role": bad, "content": "x"} for bad in (None, 1, [], {})),
    {"content": "x"},
    *({"role": "user", "content": "x", "name": bad} for bad in (1, [], {}, True)),
    {"role": "tool", "content": "x", "tool_call_id": 3},
    *({"role": "assistant", "tool_calls": bad} for bad in (1, [1], [{}], [{**CALL, "id": 1}])),
    *({"role": "assistant", "tool_calls": [{**CALL, "type": bad}]} for bad in (None, "x", 1)),
    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
)
"""Messages that are none."""


def _values() -> list[tuple[str, Any]]:
    numbers = [(of, bad) for of, bads in OUT_OF_RANGE.items() for bad in (*bads, *NUMBERS)]
    return numbers + [(of, bad) for of, bads in OTHERS for bad in bads]


def completion(**fields: object) -> tuple[str, Body]:
    """Return a short completion with some other fields."""
    return "completions", {"model": "demo", "prompt": "hi", "max_tokens": 4, **fields}


def chat(**fields: object) -> tuple[str, Body]:
    """Return a short chat with some other fields."""
    return "chat", {"model": "demo", "messages": HI, "max_tokens": 4, **fields}


REFUSED: list[tuple[str, Body, str]] = [
    *((*make(**{of: bad}), of) for make in (completion, chat) for of, bad in _values()),
    *((*completion(**{of: bad}), of) for of, bads in OF_COMPLETIONS for bad in bads),
    *((*chat(**{of: bad}), of) for of, bads in OF_CHATS for bad in bads),
    *((*chat(messages=[*HI, bad]), "messages") for bad in MESSAGES),
    *((*completion(stream=True, stream_options=bad), "stream_options") for bad in ("abc", [1], 5)),
    (*completion(stream=True, prompt_logprobs=1), "prompt_logprobs"),
    (*chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
    *((*make(model=bad), "model") for make in (completion, chat) for bad in (None, 5, [], {})),
    ("chat", {"model": "demo"}, "messages"),
    ("chat", {"model": "demo", "messages": None}, "messages"),
    ("chat", {"model": "demo", "prompt": "hi"}, "messages"),
    ("completions", {"model": "demo"}, "prompt"),
    ("completions", {"model": "demo", "prompt": None}, "prompt"),
    ("completions", {"model": "demo", "messages": HI}, "prompt"),
]
"""Kind, body, and the parameter that the refusal names, with status 400 (`model`: 404)."""

NULLS = (
    *("n", "stop", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("max_tokens", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty", "user"),
    *("best_of", "ignore_eos", "stop_token_ids", "repetition_penalty", "length_penalty", "echo"),
    *("use_beam_search", "prompt_logprobs", "logprobs", "response_format", "priority", "suffix"),
    *("bad_words", "skip_special_tokens", "cache_salt", "return_token_ids", "service_tier"),
    *("kv_transfer_params", "prompt_embeds", "vllm_xargs", "request_id", "structured_outputs"),
)
CHAT_NULLS = (
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "metadata"),
    *("max_completion_tokens", "top_logprobs", "reasoning_effort", "modalities", "audio", "store"),
    *("documents", "chat_template", "chat_template_kwargs", "add_generation_prompt", "logprobs"),
    *("prediction", "verbosity", "web_search_options", "include_reasoning"),
)
MESSAGE_NULLS = ("name", "tool_calls", "function_call", "refusal", "audio", "tool_call_id")

ACCEPTED: list[tuple[str, Body]] = [
    *(make(**{of: None}) for make in (completion, chat) for of in NULLS),
    *(chat(**{of: None}) for of in CHAT_NULLS),
    completion(**dict.fromkeys(NULLS)),
    chat(**dict.fromkeys((*NULLS, *CHAT_NULLS))),
    chat(tool_choice="none", functions=None, stop=None, stream=True, stream_options=None),
    chat(messages=[{**HI[0], **dict.fromkeys(MESSAGE_NULLS)}, *HI]),
    chat(messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *HI]),
    chat(messages=[*HI, {"role": "assistant", "content": None, "tool_calls": None}, *HI]),
    chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
    chat(messages=[{"role": "user", "content": [{"image_url": "data:,x"}]}]),
    chat(messages=[*HI, {"role": "user", "content": [{"type": "image_embeds", "uuid": "x"}]}]),
    chat(messages=[*HI, {"role": "function", "name": "f", "content": None}]),
    chat(messages=[*HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]),
    chat(messages=[*HI, {"role": "assistant", "content": "", "annotations": [], "audio": None}]),
    chat(messages=[*HI, {"role": "tool", "content": "x", "tool_call_id": "a"}]),
    chat(metadata={}, store=False, service_tier="auto", logit_bias={}, stop=[], seed=-1),
    chat(messages=[{"role": "anybody", "content": "x"}]),
    *(make(temperature=0.5, top_p=0.2, top_k=-1, seed=-(2**63)) for make in (completion, chat)),
    *(make(temperature=2, top_p=1, top_k=2**64 - 1, min_p=0) for make in (completion, chat)),
    *(make(repetition_penalty=1.2, presence_penalty=-2) for make in (completion, chat)),
    completion(stop=["a"] * 4, stop_token_ids=[0, 999], logit_bias={"999": -100, "0": 1e9}),
    completion(temperature="0.5", seed=3.0, ignore_eos="true"),  # as pydantic and vLLM read them
    completion(stream=True, stream_options={"include_usage": None}),
    chat(stream=True, stream_options={"include_usage": False}),
    *(make(response_format={"type": "text"}) for make in (completion, chat)),
    *(completion(prompt=each) for each in ("x", [0], [999], [1.0], [True], [[1]], ["a"])),
    completion(min_tokens=4),
]
"""Kind and body of requests that simulated engines answer, too."""
