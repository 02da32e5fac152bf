"""One bare vLLM server, no Ray and no transfer: what the split deployment is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.cluster.ports import free_ports
from serving.cluster.processes import KEEP_AFFINITY
from tests.serving.client import Answer, ask, difference, post
from tests.serving.deployed import healthy
from tests.waiting import until

from .bodies import CLASSES, words

MAX_MODEL_LEN = 2048
MAX_TOKENS = 24
TOLERANCE = 1e-3
"""Of a log-probability: float32 sums in another order differ by far less."""

BLOCK = 32
LONGEST = MAX_MODEL_LEN - MAX_TOKENS

FEW_LENGTHS = (1, 2, 8, 31, 32, 33, 63, 64, 65, 200, 384, 513, 768, 1537, LONGEST - 1, LONGEST)
"""Prompt lengths: the shortest and longest, and those around whole blocks of KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Prompts with their answers, and the answer to each of `bodies.CLASSES` by name."""

    prompts: tuple[list[int], ...]
    answers: tuple[Answer, ...]
    classes: dict[str, dict[str, Any]]

    def differences(
        self, base_url: str, salt: str, lengths: Container[int] | None = None
    ) -> dict[int, str]:
        """Ask prompts again, all or those of some lengths; return what differs, by length."""
        found = {}
        for prompt, right in zip(self.prompts, self.answers, strict=True):
            if lengths is None or len(prompt) in lengths:
                answer = ask(base_url, prompt, MAX_TOKENS, salt)
                found[len(prompt)] = difference(right, answer, tolerance=TOLERANCE)
        return {length: text for length, text in found.items() if text}


def many_lengths(count: int) -> list[int]:
    """Return *count* prompt lengths: 1 to the longest, around every multiple of a block first."""
    around = [n * BLOCK + beside for n in range(1, LONGEST // BLOCK) for beside in (-1, 0, 1)]
    more = [length for length in around if length not in FEW_LENGTHS]
    step = max(1, len(more) // (count - len(FEW_LENGTHS)))
    return sorted([*FEW_LENGTHS, *more[::step]][:count])


def ask_bare_server(model: Path, prompt_lengths: Sequence[int], log: Path) -> Reference:
    """Start one in float32, ask everything, stop it."""
    prompts = tuple(words(length, 1000 + length) for length in prompt_lengths)
    with bare_server(model, dtype="float32", log=log, cores="0") as url:
        answers = tuple(ask(url, prompt, MAX_TOKENS, "bare") for prompt in prompts)
        classes = {}
        for name, asked in CLASSES.items():
            body = {name: value for name, value in asked.body.items() if name != "best_of"}
            _, classes[name] = post(f"{url}/v1/{asked.kind}", {"model": "demo", **body})
    return Reference(prompts=prompts, answers=answers, classes=classes)


START_LIMIT_S = 600.0
"""Within which it starts, also on a busy machine and beside the deployment that is compared."""


@contextmanager
def bare_server(model: Path, *, dtype: str, log: Path, cores: str = "0-1") -> Iterator[str]:
    """
    Have vLLM's own server up for the duration of the block: one request at a time, on *cores*.

    On several cores its threads wait for one another at every step, long where others run too.

    Yields:
        Its base URL.
    """
    [port] = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    settings = {
        "served-model-name": "demo",
        "dtype": dtype,
        "block-size": 32,
        "max-model-len": 2048,
        "max-num-seqs": 1,
        "kv-cache-memory-bytes": 1 << 28,
        "host": "127.0.0.1",
        "port": port,
    }
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    env = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        KEEP_AFFINITY: "1",
    }
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as said:
        server = subprocess.Popen(
            [*command, *options, "--enforce-eager", "--disable-log-stats"],
            env=env,
            stdout=said,
            stderr=said,
        )
        try:
            until(lambda: server.poll() is not None or healthy(url), log.name, START_LIMIT_S)
            assert server.poll() is None, log.read_text()[-3000:]
            yield url
        finally:
            server.terminate()
            server.wait(timeout=START_LIMIT_S)
