"""vLLM's own servers, with the settings of our replicas: one alone, or a prefill/decode pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen

import aiohttp

from endpoints.client import Sample, stream
from minicluster.errors import TargetFailed
from serving.cluster.ports import free_ports
from serving.deployment.engine_args import DeployTarget, engine_kwargs, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import aiohttp

    from minicluster.plan import Deployment, Pool

STARTS_WITHIN_S = 240.0
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@contextmanager
def servers(deployment: Deployment, pools: tuple[Pool, ...], logs: Path) -> Iterator[list[str]]:
    """Have a server up for each pool, on its first core; yields their addresses."""
    ports = free_ports(2 * len(pools))
    with ExitStack() as stack:
        started = []
        for pool, port, side in zip(pools, ports[::2], ports[1::2], strict=True):
            log = stack.enter_context((logs / f"bare-{pool.role}-{port}.txt").open("w"))
            core = pool.placement[0].gpus[0]
            settings = {
                **environment(deployment, [(core,)], DeployTarget(kind="cpu")),
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            }
            server = subprocess.Popen(  # noqa: S603
                _command(deployment, pool, port),
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
            )
            stack.callback(_stop, server)
            started.append((server, f"http://127.0.0.1:{port}"))
        for server, url in started:
            _wait(server, url)
        yield [url for _, url in started]


def _command(deployment: Deployment, pool: Pool, port: int) -> list[str]:
    options = []
    for name, value in engine_kwargs(deployment, pool, DeployTarget(kind="cpu")).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            options += [option] if value else []
        else:
            options += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", deployment.model.source, "--served-model-name", deployment.model.id),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
        *options,
    ]


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):  # noqa: S310  (our own)
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise TargetFailed(f"no bare vLLM server at {url}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait(timeout=60)


async def split_stream(
    session: aiohttp.ClientSession, urls: list[str], asked: dict[str, Any]
) -> Sample:
    """Send one completion through a pair, as a proxy without any cost of its own would."""
    started = time.perf_counter()
    one = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
    del one["stream_options"]
    async with session.post(f"{urls[0]}/v1/completions", json=one) as answer:
        fetched = (await answer.json())["kv_transfer_params"]
    return await stream(session, urls[1], {**asked, "kv_transfer_params": fetched}, 0.0, started)
