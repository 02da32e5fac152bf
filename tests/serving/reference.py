"""One bare vLLM server, no Ray and no transfer: what the split deployment is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from serving.cluster.ports import free_ports
from serving.cluster.processes import KEEP_AFFINITY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_LIMIT_S = 180


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
            _wait_until_up(server, url, log)
            yield url
        finally:
            server.terminate()
            server.wait(timeout=60)


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:  # noqa: S310
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
