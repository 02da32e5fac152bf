"""The files on a request's way through serving, as docs/index.md names them in eight steps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.true_steps import TrueSteps
from serving.protocol.app_spec import SimulatedSettings
from serving.protocol.messages import EndpointConfig, to_plain
from serving.replicas.simulated_servers import SimulatedAnswerServer, SimulatedPrefillServer
from tests.serving.virtual_time import in_virtual_time

from .gates import Replicas
from .test_ingress import HOUR_S, at_port, config, no_worker

__all__ = ["at_port", "config", "no_worker"]  # fixtures

ROOT = Path(__file__).parents[3]
SERVING = ROOT / "serving"
INDEX = ROOT / "docs" / "index.md"
ENGINES = re.compile(r"serving/(simulated/|replicas/(simulated_servers|vllm)\.py)")
"""Files of the last step: vLLM's is one, beside which nothing else knows the engine."""

MOST_FILES = 16


@contextmanager
def traced(files: set[str]) -> Iterator[None]:
    """Collect the files of serving whose functions run in this thread."""
    inside = str(SERVING) + "/"

    def note(frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(inside) and frame.f_code.co_name != "<module>":
            files.add(str(Path(name).relative_to(ROOT)))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def engines(config: EndpointConfig, role: str) -> SimulatedSettings:
    """Return simulated engines of a role of the plan."""
    step = config.step_model
    assert step is not None
    return SimulatedSettings(
        role=role,
        slowdown=1.0,
        limits=EngineLimits(
            kv_blocks=64, block_size=32, max_num_seqs=4, max_num_batched_tokens=512
        ),
        lanes=1,
        ranks=1,
        lora=None,
        steps=TrueSteps(steps=step),
        keeps_steps=False,
        lease_s=HOUR_S,
        model=config.model_id,
        adapters=(),
        source="",
        vocab_size=1000,
        max_model_len=config.max_model_len,
        unasked_tokens=16,
        facts={},
        places=({},),
    )


class OnePrefillServer(SimulatedPrefillServer):
    """Ours without Ray Serve around it."""

    def __del__(self) -> None:  # type: ignore[override]
        """Python's own end: Ray Serve awaits ours before."""


class OneAnswerServer(SimulatedAnswerServer):
    """Ours without Ray Serve around it."""

    def __del__(self) -> None:  # type: ignore[override]
        """Python's own end: Ray Serve awaits ours before."""


class SimulatedReplicas(Replicas):
    """Replicas with the servers of simulated engines behind their channels."""

    def __init__(self, config: EndpointConfig) -> None:
        super().__init__()
        self.config = config
        self.servers: list[Any] = []

    async def start(self, deployment: str, *names: str) -> None:
        """Start the server of a deployment."""
        prefill = deployment.startswith("Prefill")
        kind = OnePrefillServer if prefill else OneAnswerServer
        server: Any = kind.__new__(kind)
        await server.__init__(engines(self.config, "prefill" if prefill else "decode"))
        await server.reconfigure(to_plain(self.config))
        self.servers.append(server)
        self.named[deployment] = dict.fromkeys(names, server.listeners[0])

    def close(self) -> None:
        """End the servers without their end of Ray Serve."""
        super().close()
        for server in self.servers:
            server._watch.cancel()


@in_virtual_time
async def test_a_request_s_life_is_told(
    at_port: Callable[..., Any],
    replicas: Replicas,
    config: EndpointConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The eight steps name the files whose functions run for one streamed completion."""
    simulated, here = SimulatedReplicas(config), SimpleNamespace(unique_id="r")
    context = SimpleNamespace(
        app_name="a", rank=SimpleNamespace(rank=0), replica_id=here, gang_context=None
    )
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("serving.replicas.simulated_servers.keep_log_open", lambda: None)
    for method in ("start", "close", "live", "places"):
        monkeypatch.setattr(replicas, method, getattr(simulated, method))
    replicas.named = simulated.named
    files: set[str] = set()
    async with at_port(config, 1) as (_, endpoints):
        await endpoints.ask(stream=True)  # connects the replicas
        with traced(files):
            answer = await endpoints.ask(max_tokens=6, stream=True)
    assert answer.text.count("data: {") == 6
    assert answer.headers["X-Minicluster-Path"] == "remote"
    told = told_files()
    engine = {file for file in told if ENGINES.match(file)}
    assert {file for file in files if not ENGINES.match(file)} == told - engine
    assert "serving/replicas/vllm.py" in engine
    assert len(told - engine) + 1 <= MOST_FILES


def told_files() -> set[str]:
    """Return the files that the section on a request's life names; each is there."""
    section = re.search(r"\n## A request's life\n(.*?)(\n## |\Z)", INDEX.read_text(), re.DOTALL)
    assert section is not None
    steps = re.findall(r"^\d\. .*$", section[1], re.MULTILINE)
    assert len(steps) == 8
    named = {f"serving/{name}" for step in steps for name in re.findall(r"`([a-z_/]+\.py)`", step)}
    assert all((ROOT / name).is_file() for name in named)
    return named
