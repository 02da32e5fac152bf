"""The endpoint of a plan deployed by `serving up`: what it answers, refuses and survives."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from serving.cluster.ports import free_ports

from .client import events, post

if TYPE_CHECKING:
    from pathlib import Path

    from .deployed import Split

pytestmark = pytest.mark.engine


def _serving(place: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `serving`."""
    command = [sys.executable, "-m", "serving.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def _answers(base_url: str) -> bool:
    """Tell whether the engines still work."""
    status, body = post(f"{base_url}/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    return status == 200 and body["usage"]["completion_tokens"] == 3


def test_up_says_where_it_serves(base_url: str, place: Path) -> None:
    """The last words of `serving up` are where which model is served, and how to stop it."""
    said = (place / "up.txt").read_text()
    assert f"ready: {base_url}/v1 serves demo" in said
    assert "serving down" in said


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
    url = f"{base_url}/v1/chat/completions"
    with _stream(url, body) as answer:
        times = []
        while line := answer.readline():
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                times.append((time.monotonic(), delta))
    assert times[0][1]["role"] == "assistant"
    first_token = next(at for at, delta in times if delta.get("content"))
    assert first_token - times[0][0] < 0.5 * (times[-1][0] - times[0][0])


def _stream(url: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
    """Open a stream."""
    import urllib.request  # noqa: PLC0415

    raw = json.dumps({**body, "stream": True}).encode()
    return urlopen(urllib.request.Request(url, raw), timeout=60)  # noqa: S310


def test_server_timing(base_url: str) -> None:
    """Every answer says how long prefill and hand-off took, streamed or not."""
    with _stream(f"{base_url}/v1/completions", {"prompt": "x", "max_tokens": 1}) as answer:
        timing = answer.headers["Server-Timing"]
    names = [part.split(";dur=")[0] for part in timing.split(", ")]
    assert names == ["prefill", "queue", "step", "handoff"]


def test_models_and_health(base_url: str) -> None:
    """The one model is listed and described, and the endpoint calls itself healthy."""
    with urlopen(f"{base_url}/v1/models") as answer:  # noqa: S310
        [model] = json.loads(answer.read())["data"]
    assert (model["id"], model["max_model_len"]) == ("demo", 2048)
    with urlopen(f"{base_url}/v1/models/demo") as answer:  # noqa: S310
        assert json.loads(answer.read()) == model
    with urlopen(f"{base_url}/health") as answer:  # noqa: S310
        assert answer.status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", b"{", 400),
        ("completions", b"\xff", 400),
        ("completions", {"model": "gpt-9", "prompt": "x"}, 404),
        ("chat/completions", {"model": "gpt-9", "messages": []}, 404),
        ("completions", {}, 400),
        ("completions", {"prompt": ""}, 400),
        ("completions", {"prompt": [9_999_999]}, 400),
        ("completions", {"prompt": [-1]}, 400),
        ("completions", {"prompt": "x", "max_tokens": "many"}, 400),
        ("completions", {"prompt": "x", "temperature": -1}, 400),
        ("completions", {"prompt": "x", "top_p": 7}, 400),
        ("completions", {"prompt": " baba" * 2048, "max_tokens": 1}, 400),
        ("completions", {"prompt": " baba" * 2040, "max_tokens": 100}, 400),
        ("completions", {"prompt": [2500] * 2048, "max_tokens": 1}, 400),
        ("completions", {"prompt": ["a", []]}, 400),
        ("completions", {"prompt": "x", "n": 65}, 400),
        ("completions", {"prompt": "x", "best_of": 3}, 400),
        ("completions", {"prompt": "x", "prompt_logprobs": -7}, 400),
        ("completions", {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}, 400),
        ("completions", {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "{}"}}, 400),
        ("completions", {"prompt": "x", "stream": "maybe"}, 400),
        ("chat/completions", {"messages": "hi"}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 0}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 9000}]}, 400),
        ("nothing/here", {}, 404),
    ],
)
def test_bad_input_is_refused_and_does_no_harm(
    base_url: str, path: str, body: object, status: int
) -> None:
    """What is wrong gets one clear error in OpenAI's shape, and the engines go on."""
    got, answer = post(f"{base_url}/v1/{path}", body)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert "Traceback" not in answer["error"]["message"]
    assert _answers(base_url)


def test_min_tokens_is_kept(base_url: str) -> None:
    """`min_tokens` does not reach prefill, which makes one token only, and is obeyed."""
    status, body = post(
        f"{base_url}/v1/completions", {"prompt": "x", "max_tokens": 8, "min_tokens": 8}
    )
    assert (status, body["usage"]["completion_tokens"]) == (200, 8)


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


def test_clients_that_leave_do_no_harm(split: Split) -> None:
    """Clients that hang up at any moment leave engines that answer, and nothing running."""
    address = urlsplit(split.base_url)
    rng = random.Random(13)  # noqa: S311
    for _ in range(24):
        prompt = [rng.randrange(2361, 4361) for _ in range(300)]
        raw = json.dumps({"prompt": prompt, "max_tokens": 200, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(head.encode() + raw)
            time.sleep(rng.uniform(0, 0.6))
    split.wait_until_released()
    assert _answers(split.base_url)


def test_status_and_verify(base_url: str, place: Path) -> None:
    """Status and verify agree that everything is up and as planned."""
    status = json.loads(_serving(place, "status", "--json").stdout)
    assert (status["base_url"], status["ready"], status["answers"]) == (base_url, True, True)
    assert [(p["role"], p["deployed"], p["healthy"]) for p in status["pools"]] == [
        ("prefill", 1, True),
        ("decode", 1, True),
    ]
    verify = _serving(place, "verify", "--json")
    assert verify.returncode == 0, verify.stderr
    assert json.loads(verify.stdout) == {"as_planned": True, "differences": [], "changes": []}
    logs = _serving(place, "logs", "-n", 1)
    assert "Decode:demo" in logs.stdout


def test_verify_notices_another_plan(base_url: str, place: Path) -> None:
    """If the plan says otherwise than what runs, verify names it and ends with 3."""
    stored = place / ".minicluster/serving/deployment.json"
    before = stored.read_text()
    plan = json.loads(before)
    plan["pools"][1]["max_num_seqs"] = 7
    try:
        stored.write_text(json.dumps(plan))
        verify = _serving(place, "verify")
    finally:
        stored.write_text(before)
    assert verify.returncode == 3
    assert "decode[0].max_num_seqs: deployed 16, planned 7" in verify.stderr
    assert _answers(base_url)


def test_one_deployment_a_directory(base_url: str, place: Path) -> None:
    """A second `serving up` from the same place is refused and touches nothing."""
    second = _serving(place, "up", "plan.json", "--port", free_ports(1)[0])
    assert second.returncode == 2
    assert "serving down" in second.stderr
    assert _answers(base_url)
