"""
Measure TTFT and TPOT of vLLM on this GPU: models of random weights, users in a closed loop.

    python benchmarks/gpu_serving.py --out FOLDER [--minutes 9] [MODEL ...]

Needs a CUDA GPU and vLLM, and nothing else of this repository. Prompts are random token ids, sent
as ids: nothing is tokenised and no prefix is cached. Every user sends its next request when its
answer has ended; all begin at once. Each load is one line of FOLDER/serving.csv as soon as it is
measured, each request one of FOLDER/requests.csv.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

USER_REQUESTS = 4
"""Requests that each user sends: the first wave, in which all prompts arrive at once, and three."""
START_LIMIT_S = 240.0

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
QWEN: dict[str, Any] = DENSE | {
    "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": DENSE | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 128256,
    },
    "Qwen/Qwen3-32B": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120,
        "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    },
}  # fmt: skip
"""Published `config.json` of each model, as far as vLLM reads it."""

SERVERS = {"meta-llama/Llama-3.1-8B": (18423, 0.3), "Qwen/Qwen3-32B": (18424, 0.62)}
"""The port and the share of the GPU's memory of each server; only one has requests at a time."""
KV_BYTES = 24 << 30
"""KV cache of each server: more than any load here fills."""
LOADS = (
    ("meta-llama/Llama-3.1-8B", 1024, 256, 1),
    ("meta-llama/Llama-3.1-8B", 1024, 256, 8),
    ("meta-llama/Llama-3.1-8B", 1024, 256, 32),
    ("Qwen/Qwen3-32B", 1024, 128, 1),
    ("Qwen/Qwen3-32B", 1024, 128, 8),
    ("Qwen/Qwen3-32B", 1024, 128, 32),
    ("meta-llama/Llama-3.1-8B", 4096, 256, 1),
    ("meta-llama/Llama-3.1-8B", 4096, 256, 8),
    ("Qwen/Qwen3-32B", 4096, 128, 1),
    ("Qwen/Qwen3-32B", 4096, 128, 8),
    ("meta-llama/Llama-3.1-8B", 1024, 256, 64),
    ("meta-llama/Llama-3.1-8B", 4096, 256, 32),
    ("Qwen/Qwen3-32B", 1024, 128, 64),
)
"""Model, prompt tokens, answer tokens and users, in the order of measurement."""

CAPTURED = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512]
"""Batch sizes that become CUDA graphs: a start of seconds instead of the default's fifty sizes."""
ATTEMPTS = (
    {"cudagraph_capture_sizes": CAPTURED},
    {"cudagraph_capture_sizes": CAPTURED, "mode": 0, "cudagraph_mode": "FULL"},
)
"""vLLM's own compilation, and CUDA graphs of its kernels where this fails."""


def main() -> int:
    """Measure every load of the models named; return 1 if a server did not start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SERVERS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="no load begins after this time")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.models) - set(SERVERS)):
        parser.error(f"no loads for {', '.join(unknown)}; expected of: {', '.join(SERVERS)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * chosen.minutes
    with ThreadPoolExecutor() as threads, ExitStack() as running:
        ups = {model: threads.submit(_up, model, chosen.out, running) for model in chosen.models}
        attempts = {model: up.result() for model, up in ups.items()}
        for model, isl, osl, users in LOADS:
            attempt = attempts.get(model)
            if attempt is None:
                continue
            if time.monotonic() > end_s:
                print(f"no time for {model} {isl} {osl} {users}", flush=True)
                continue
            done = asyncio.run(_closed_loop(model, isl, osl, users, USER_REQUESTS))
            _write(chosen.out, model, (isl, osl, users), attempt, done)
    return int(None in attempts.values())


def _up(model: str, out: Path, running: ExitStack) -> int | None:
    """Start a model's server and warm it up; return with which of the attempts, if any."""
    folder = _write_model(model)
    for attempt, compilation in enumerate(ATTEMPTS):
        log = out / f"server_{model.split('/')[1]}_{attempt}.log"
        begin_s = time.monotonic()
        server = _started(model, folder, compilation, log)
        running.callback(_end, server)
        if not _is_up(model, server):
            _end(server)
            print(f"{model}: no server with {compilation}", log.read_text()[-1500:], flush=True)
            continue
        for isl in (1024, 4096, 1024):
            asyncio.run(_closed_loop(model, isl, 16, 4, 2))
        print(f"{model}: up and warm after {time.monotonic() - begin_s:.0f} s", flush=True)
        return attempt
    return None


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server with all its processes."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _write_model(model: str) -> Path:
    """Write a model folder: the shape, and a tokenizer with as many words as the model has."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    folder = Path(tempfile.gettempdir(), "models", model.split("/")[1])
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[model]
    (folder / "config.json").write_text(json.dumps(shape))
    words = {f"w{number}": number for number in range(shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def _started(
    model: str, folder: Path, compilation: dict[str, Any], log: Path
) -> subprocess.Popen[bytes]:
    """Start vLLM's API server in a session of its own."""
    port, memory = SERVERS[model]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "model", "--load-format", "dummy", "--host", "127.0.0.1",
        "--port", str(port), "--gpu-memory-utilization", str(memory),
        "--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", "8192",
        "--generation-config", "vllm", "--compilation-config", json.dumps(compilation),
    ]  # fmt: skip
    own = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip
    with log.open("wb") as file:
        return subprocess.Popen(  # noqa: S603  (our own command)
            command, stdout=file, stderr=file, env=os.environ | own, start_new_session=True
        )


def _is_up(model: str, server: subprocess.Popen[bytes]) -> bool:
    """Wait until the server answers; false if it ends or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{SERVERS[model][0]}/health", timeout=2):
                return True
        except OSError:
            time.sleep(0.5)
    return False


async def _closed_loop(
    model: str, isl: int, osl: int, users: int, each: int
) -> list[tuple[float, float, float]]:
    """Return for every request when it was sent, its TTFT and its mean time per further token."""
    vocab, port = SHAPES[model]["vocab_size"], SERVERS[model][0]
    bodies = [
        [
            _request(port, osl, random.choices(range(2, vocab), k=isl))  # noqa: S311  (prompts)
            for _ in range(each)
        ]
        for _ in range(users)
    ]
    begin_s = time.perf_counter()

    async def user(own: list[bytes]) -> list[tuple[float, float, float]]:
        return [await _send(port, body, osl, begin_s) for body in own]

    found = await asyncio.gather(*(user(own) for own in bodies))
    return [request for own in found for request in own]


def _request(port: int, osl: int, prompt: list[int]) -> bytes:
    """Return an HTTP request for a stream of exactly *osl* tokens."""
    body = json.dumps({
        "model": "model", "prompt": prompt, "max_tokens": osl, "ignore_eos": True,
        "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _send(port: int, request: bytes, osl: int, begin_s: float) -> tuple[float, float, float]:
    """Send one request and time its stream; chunks are not parsed, so that the client is fast."""
    sent_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(request)
    first_s = last_s = 0.0
    tail = b""
    while data := await reader.read(1 << 16):
        now_s = time.perf_counter()
        if b'"text"' in data:
            first_s, last_s = first_s or now_s, now_s
        tail = (tail + data)[-4000:]
    writer.close()
    counted = re.findall(rb'"completion_tokens":(\d+)', tail)
    if b"[DONE]" not in tail or not counted or int(counted[-1]) != osl:
        raise RuntimeError(f"not the {osl} tokens asked for: {tail[-500:]!r}")
    return sent_s - begin_s, first_s - sent_s, (last_s - first_s) / (osl - 1)


def _write(
    out: Path,
    model: str,
    load: tuple[int, int, int],
    attempt: int,
    done: list[tuple[float, float, float]],
) -> None:
    """Append one line for the load, and one for each of its requests."""
    isl, osl, users = load
    line: dict[str, object] = {
        "model": model, "isl": isl, "osl": osl, "users": users, "requests": len(done),
        "attempt": attempt,
    }  # fmt: skip
    for name, values in (("ttft", [one[1] for one in done]), ("tpot", [one[2] for one in done])):
        ranked = sorted(values)
        line[f"{name}_s"] = f"{statistics.fmean(values):.6g}"
        for share in (50, 90, 99):
            at = ranked[min(len(ranked) - 1, round(share / 100 * (len(ranked) - 1)))]
            line[f"{name}_p{share}_s"] = f"{at:.6g}"
    print(" ".join(f"{key}={value}" for key, value in line.items()), flush=True)
    with (out / "serving.csv").open("a", newline="") as file:
        writer = csv.DictWriter(file, line)
        if not file.tell():
            writer.writeheader()
        writer.writerow(line)
    with (out / "requests.csv").open("a", newline="") as file:
        rows = csv.writer(file)
        for one in done:
            rows.writerow([model, *load, *(f"{value:.6g}" for value in one)])


if __name__ == "__main__":
    raise SystemExit(main())
