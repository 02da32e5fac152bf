"""
Time that vLLM's API server adds to TTFT: `per_request_s` of configs/engines.

    python benchmarks/api_server.py

It measures the TTFT of a client on the same machine, minus the engine's own queue and prefill time,
with a tiny model and cached prompts of about 470 tokens. It takes two minutes, and needs a machine
without other load.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from serving.measurement.demo_model import DemoShape, make_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT = 18731
URL = f"http://127.0.0.1:{PORT}"
STARTS_WITHIN_S = 240.0
REQUESTS = 100
PROMPTS = 45
PROMPT_CHARACTERS = 566
"""Some 470 tokens for the demo model's tokenizer."""
OUTPUT_TOKENS = 32
REQUESTS_PER_S = 5.0
SHAPE = DemoShape(num_layers=2, hidden_size=64, ffn_size=128, num_heads=2, num_kv_heads=1)
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def server(directory: Path) -> Iterator[None]:
    """Serve the model for as long as it is needed."""
    model = make_demo_model(directory / "model", SHAPE)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(PORT),
        "--max-model-len", "2048", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | SETTINGS, stdout=log, stderr=log)  # noqa: S603
        try:
            until = time.monotonic() + STARTS_WITHIN_S
            while not up():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit((directory / "log").read_text()[-2000:])
                time.sleep(1)
            yield
        finally:
            process.terminate()
            process.wait(30)


def up() -> bool:
    """Return whether the server answers."""
    try:
        return httpx.get(f"{URL}/health").is_success
    except httpx.TransportError:
        return False


def engine_s() -> tuple[float, float]:
    """Seconds of queue and prefill so far, and requests."""
    text = httpx.get(f"{URL}/metrics").text
    sums = [
        float(found)
        for part in ("queue", "prefill")
        for found in re.findall(
            rf"^vllm:request_{part}_time_seconds_sum{{.*}} (\S+)", text, re.MULTILINE
        )
    ]
    counts = re.findall(r"^vllm:request_prefill_time_seconds_count{.*} (\S+)", text, re.MULTILINE)
    return sum(sums), float(counts[0])


async def ttft_s(client: httpx.AsyncClient, prompt: str) -> float:
    """Stream one answer."""
    body = {
        "model": "m", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True,
        "stream": True, "temperature": 0,
    }  # fmt: skip
    start, first = time.perf_counter(), None
    async with client.stream("POST", f"{URL}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:") and first is None:
                first = time.perf_counter() - start
    if first is None:
        raise SystemExit(f"no token: {answer.status_code}")
    return first


async def measure() -> None:
    """Print what is left of TTFT, one request after the other and with Poisson arrivals."""
    draw = random.Random(1)  # noqa: S311  (prompts, not secrets)
    letters = "abcdefghij klmnop"
    prompts = ["".join(draw.choices(letters, k=PROMPT_CHARACTERS)) for _ in range(PROMPTS)]
    async with httpx.AsyncClient(timeout=60) as client:
        for prompt in prompts:
            await ttft_s(client, prompt)
        for name, rate in (("one after the other", None), ("5 requests/s", REQUESTS_PER_S)):
            before = engine_s()
            tasks = []
            for number in range(REQUESTS):
                tasks.append(asyncio.create_task(ttft_s(client, prompts[number % PROMPTS])))
                if rate is None:
                    await tasks[-1]
                else:
                    await asyncio.sleep(draw.expovariate(rate))
            seen = statistics.mean(await asyncio.gather(*tasks))
            after = engine_s()
            inside = (after[0] - before[0]) / (after[1] - before[1])
            print(
                f"{name}: TTFT {seen * 1e3:.1f} ms, queue and prefill {inside * 1e3:.1f} ms,"
                f" API server and client {(seen - inside) * 1e3:.1f} ms"
            )


def main() -> None:
    """Serve, ask, print."""
    with tempfile.TemporaryDirectory() as directory, server(Path(directory)):
        asyncio.run(measure())


if __name__ == "__main__":
    main()
