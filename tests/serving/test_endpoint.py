"""The endpoint of a plan deployed by `serving up`: what it answers, refuses and survives."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from serving.cluster import free_ports
from serving.processes import marked
from sizing.child import run_child
from sizing.plan import to_json

from .client import Answer, ask, difference, events, post
from .reference import bare_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .conftest import DeploymentMaker, PlanMaker

pytestmark = pytest.mark.engine

MAX_TOKENS = 24
ROUNDING = 2 / 16 + 1e-3
"""
Of bfloat16, in log-probability. The best logits here are between 8 and 16, where neighbouring
bfloat16 numbers are 1/16 apart: two logits of which each is rounded to a neighbour swap places if
they are up to 2/16 apart.
"""


def _serving(place: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `serving`."""
    command = [sys.executable, "-m", "serving.cli", *map(str, arguments)]
    return subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return 48 prompts of 16 to 300 tokens."""
    rng = random.Random(11)  # noqa: S311
    return [[rng.randrange(2361, 4361) for _ in range(rng.randint(16, 300))] for _ in range(48)]


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, prompts: list[list[int]]
) -> list[Answer]:
    """Return what a single engine answers in bfloat16, one at a time."""
    log = tmp_path_factory.mktemp("reference") / "server.txt"
    with bare_server(demo_model, dtype="bfloat16", log=log) as url:
        return [ask(url, prompt, MAX_TOKENS, "bare") for prompt in prompts]


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    demo_model: Path,
    make_deployment: DeploymentMaker,
    make_plan: PlanMaker,
) -> Path:
    """Return the directory that the plan is deployed from."""
    directory = tmp_path_factory.mktemp("endpoint")
    (directory / "plan.json").write_text(to_json(make_plan(make_deployment(demo_model))))
    return directory


@pytest.fixture(scope="module")
def base_url(
    place: Path,
    reference: list[Answer],  # noqa: ARG001  (first, so that the two do not share cores)
) -> Iterator[str]:
    """Have the plan deployed."""
    [port] = free_ports(1)
    said = place.parent / "up.txt"
    up = [sys.executable, "-m", "serving.cli", "up", "plan.json", "--port", str(port)]
    with said.open("w") as file:
        # Not `subprocess.run`, which at Ctrl-C would kill it before it has stopped Ray again.
        code = run_child(up, cwd=place, stdout=file, stderr=file)
    assert code == 0, said.read_text()
    assert f"http://127.0.0.1:{port}/v1 serves demo" in said.read_text()
    state = json.loads((place / ".minicluster/serving/state.json").read_text())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        down = _serving(place, "down")
    assert down.returncode == 0, down.stderr
    assert marked(state["cluster_id"]) == set(), "processes left"
    assert {file.name for file in (place / ".minicluster/serving").iterdir()} == {"logs"}


def _answers(base_url: str) -> bool:
    """Tell whether the engines still work."""
    status, body = post(f"{base_url}/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    return status == 200 and body["usage"]["completion_tokens"] == 3


def test_bfloat16_under_load(
    base_url: str,
    prompts: list[list[int]],
    reference: list[Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With 16 at once tokens differ only where the two best are closer than rounding errs."""
    with ThreadPoolExecutor(max_workers=16) as clients:
        answers = list(clients.map(lambda p: ask(base_url, p, MAX_TOKENS, "bf16"), prompts))
    gaps = []
    for right, answer in zip(reference, answers, strict=True):
        places = [i for i in range(MAX_TOKENS) if right.tokens[i] != answer.tokens[i]]
        if places:  # what follows the first other token answers another question
            best, second = right.best_two[places[0]]
            gaps.append(best - second)
    with capsys.disabled():
        sys.stdout.write(f"\nbfloat16: {len(gaps)} of {len(prompts)} answers part, ")
        sys.stdout.write(f"where the two best are at most {max(gaps, default=0):.2g} apart\n")
    assert max(gaps, default=0.0) <= ROUNDING
    assert len(gaps) < len(prompts) / 2


def test_one_at_a_time_in_bfloat16(
    base_url: str, prompts: list[list[int]], reference: list[Answer]
) -> None:
    """Alone in the system a request is answered as by a single engine, within rounding."""
    found = [
        difference(right, ask(base_url, prompt, 1, "alone"), tolerance=ROUNDING)
        for prompt, right in zip(prompts[:8], [_first(r) for r in reference[:8]], strict=True)
    ]
    assert found == [None] * 8


def _first(answer: Answer) -> Answer:
    """Return the first token of an answer."""
    return Answer(tokens=answer.tokens[:1], best_two=answer.best_two[:1])


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
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
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


def test_clients_that_leave_do_no_harm(base_url: str) -> None:
    """Clients that hang up at any moment leave engines that answer, and nothing running."""
    address = urlsplit(base_url)
    rng = random.Random(13)  # noqa: S311
    for _ in range(24):
        prompt = [rng.randrange(2361, 4361) for _ in range(300)]
        raw = json.dumps({"prompt": prompt, "max_tokens": 200, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(head.encode() + raw)
            time.sleep(rng.uniform(0, 0.6))
    assert _answers(base_url)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        started = time.perf_counter()
        assert _answers(base_url)
        if time.perf_counter() - started < 1:
            return
    pytest.fail("the engines are still busy with clients that left")


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
    plan["pools"][1]["max_batch_size"] = 7
    try:
        stored.write_text(json.dumps(plan))
        verify = _serving(place, "verify")
    finally:
        stored.write_text(before)
    assert verify.returncode == 3
    assert "decode[0].max_batch_size: deployed 16, planned 7" in verify.stderr
    assert _answers(base_url)


def test_one_deployment_a_directory(base_url: str, place: Path) -> None:
    """A second `serving up` from the same place is refused and touches nothing."""
    second = _serving(place, "up", "plan.json", "--port", free_ports(1)[0])
    assert second.returncode == 2
    assert "serving down" in second.stderr
    assert _answers(base_url)
