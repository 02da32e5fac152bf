"""The endpoint over vLLM: what it answers, refuses and survives."""

from __future__ import annotations

import json
import random
import time
from typing import Any
from urllib.request import Request, urlopen

import pytest

from .client import answers, events, post, send
from .deployed import Split
from .fuzz import fuzz
from .http_client import KEY

pytestmark = pytest.mark.engine

STREAM = {"prompt": "x", "stream": True}
BAD: list[tuple[str, object, int]] = [
    ("completions", STREAM | {"model": "gpt-9"}, 404),
    ("completions", {}, 400),
    ("completions", {"prompt": ""}, 400),
    ("completions", {"prompt": [9_999_999]}, 400),
    ("completions", {"prompt": [-1]}, 400),
    ("completions", STREAM | {"temperature": "hot"}, 400),
    ("completions", {"prompt": "x", "top_p": 7}, 400),
    ("completions", {"prompt": " baba" * 2048, "max_tokens": 1}, 400),
    ("completions", STREAM | {"prompt": " baba" * 2040, "max_tokens": 100}, 400),
    ("completions", {"prompt": ["a", []]}, 400),
    ("completions", {"prompt": "x", "prompt_logprobs": -7}, 400),
    ("completions", STREAM | {"prompt_logprobs": "all"}, 400),
    ("completions", STREAM | {"prompt_logprobs": 1}, 400),
    ("completions", STREAM | {"logprobs": 10_000}, 400),
    ("completions", STREAM | {"stop": [[]]}, 400),
    ("completions", STREAM | {"response_format": {"type": "json_schema"}}, 400),
    ("completions", STREAM | {"structured_outputs": {"regex": "(("}}, 400),
    ("completions", {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}, 400),
    ("chat/completions", {"messages": "hi"}, 400),
    ("chat/completions", {"messages": [{"role": "user", "content": "a " * 9000}]}, 400),
]
"""What the engines refuse, streamed or not; `tests/serving/request` has what never gets there."""


LENGTHS = {"max_tokens", "max_completion_tokens"}
"""Fields without which an answer fills the whole context, which takes seconds."""


def _open(url: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
    raw = None if body is None else json.dumps({**body, "stream": True}).encode()
    return urlopen(Request(url, raw), timeout=60)  # noqa: S310  (our own endpoint)


def _get(url: str) -> Any:  # noqa: ANN401
    with _open(url) as answer:
        return json.loads(answer.read())


def test_stream_holds_usage_and_exact_length(base_url: str) -> None:
    """A stream with `ignore_eos` and usage holds exactly the tokens asked for, then [DONE]."""
    body = {
        "prompt": [2500, 2600, 2700],
        "max_tokens": 9,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, done = events(f"{base_url}/v1/completions", body)
    usage = json.loads(chunks[-1])["usage"]
    assert done == "[DONE]"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 9)
    assert sum(bool(json.loads(c)["choices"][0]["text"]) for c in chunks[:-1]) <= 9


def test_chat_role_comes_with_the_first_token(base_url: str) -> None:
    """A chat's first event is sent only when its first token is there."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}
    with _open(f"{base_url}/v1/chat/completions", body) as answer:
        times = []
        while line := answer.readline():
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                times.append((time.monotonic(), delta))
    assert times[0][1]["role"] == "assistant"
    first_token = next(at for at, delta in times if delta.get("content"))
    assert first_token - times[0][0] < 0.5 * (times[-1][0] - times[0][0])


def test_an_unmodified_openai_client(base_url: str) -> None:
    """Models, chats, completions and streams work as its documentation says; errors are typed."""
    import openai  # noqa: PLC0415  (seconds for every worker that collects this file)

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=KEY, max_retries=0)
    chats, texts = client.chat.completions, client.completions
    assert [each.id for each in client.models.list()] == ["demo", "red", "blue"]
    hi: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    chat = chats.create(**hi)
    assert (chat.usage.completion_tokens, chat.choices[0].message.role) == (4, "assistant")
    *_, last = chats.create(**hi, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == 4
    text = texts.create(model="demo", prompt="hello", max_tokens=4, logprobs=1)
    assert text.usage
    assert text.usage.completion_tokens == 4
    *_, end = texts.create(model="demo", prompt="x", max_tokens=4, stream=True)
    assert end.choices[0].finish_reason == "length"
    broken: list[tuple[int, dict[str, Any]]] = [
        (400, {"max_tokens": -1}),
        (404, {"model": "gpt-9"}),
        (400, {"temperature": 9}),
    ]
    for status, fields in broken:
        with pytest.raises(openai.APIStatusError) as refused:
            texts.create(**{"model": "demo", "prompt": "x", **fields})
        assert (refused.value.status_code, refused.value.param) == (status, *fields)
        assert refused.value.request_id


def test_models_ready_and_plan_tell_the_truth(base_url: str) -> None:
    """Both pools are up, a probe came through, and the plan names what runs."""
    model, *_ = _get(f"{base_url}/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == ("demo", 2048)
    assert _get(f"{base_url}/v1/models/demo") == model
    assert _get(f"{base_url}/ready") == {"ready": True, "lacking": []}
    plan = _get(f"{base_url}/plan")
    for role in ("prefill", "decode"):
        [replicas] = plan["deployed"]["replicas"][role].values()
        assert replicas == {"planned": 1, "running": 1}
        [facts] = plan["deployed"]["engines"][role].values()
        assert (facts["tp"], facts["dtype"], "model" in facts) == (1, "float32", False)
    assert plan["planned"]["model_id"] == "demo"


@pytest.mark.parametrize(("path", "body", "status"), BAD)
def test_bad_input_is_refused_and_does_no_harm(
    base_url: str, path: str, body: object, status: int
) -> None:
    """What is wrong gets one clear error in OpenAI's shape, and the engines go on."""
    got, answer = post(f"{base_url}/v1/{path}", body)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert "Traceback" not in answer["error"]["message"]
    assert answers(base_url)


def test_broken_bodies_do_no_harm(split: Split, base_url: str) -> None:
    """
    None is a 5xx, each 4xx names a field, and valid requests between them stay right.

    After all of them both pools answer, and nothing is under way.
    """
    statuses, complaints = fuzz(base_url, 300, 5, keep=LENGTHS)
    assert complaints == []
    assert statuses[200] >= 40
    split.wait_until_released()
    assert answers(base_url)


def test_two_adapters_answer_differently_through_one_endpoint(base_url: str) -> None:
    """The model's name chooses the adapter in both pools, which have one slot; others are none."""
    body = {"prompt": list(range(2400, 2500)), "max_tokens": 12, "temperature": 0}
    said: dict[str, str] = {}
    for name in ("demo", "red", "blue", "demo", "red"):
        reply = send(f"{base_url}/v1/completions", body | {"model": name})
        assert (reply.done, reply.path, reply.body["model"]) == (True, "remote", name), reply
        text = reply.body["choices"][0]["text"]
        assert said.setdefault(name, text) == text
    assert len(set(said.values())) == 3
    unknown = send(f"{base_url}/v1/completions", body | {"model": "green"})
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "model_not_found")


def test_min_tokens_is_kept(base_url: str) -> None:
    """`min_tokens` does not reach prefill, which makes one token only, and is obeyed."""
    body = {"prompt": "x", "max_tokens": 8, "min_tokens": 8}
    status, answer = post(f"{base_url}/v1/completions", body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)


def test_prefill_alone_is_timed(base_url: str) -> None:
    """The prefill pool alone says how long a prompt took and waited."""
    rng = random.Random(5)  # noqa: S311
    prompt = [rng.randrange(2361, 4361) for _ in range(100)]
    status, timing = post(f"{base_url}/internal/prefill", {"prompt": prompt})
    assert (status, timing["prompt_tokens"]) == (200, 100)
    assert 0 < timing["step_s"] <= timing["seconds"]
    assert timing["queue_s"] >= 0
    refused, body = post(f"{base_url}/internal/prefill", {"prompt": prompt, "n": 2})
    assert (refused, body["error"]["param"]) == (400, "n")
