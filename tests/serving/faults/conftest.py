"""One deployment for all failures: two prefill replicas and one that decodes, in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from serving.ports import free_ports
from serving.processes import marked
from sizing.child import run_child
from sizing.plan import Placement, to_json

from .processes import Process, processes
from .reference import Reference, ask_bare_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving.conftest import DeploymentMaker, PoolMaker

HERE = Path(__file__).parent
WHOLE = {"Prefill:demo": 2, "Decode:demo": 1, "Ingress": 1}
REPAIR_LIMIT_S = 180.0
"""Within which Ray Serve has started again whatever a test has killed."""

RELEASE_LIMIT_S = 60.0
"""Within which KV cache that nobody fetches is free again: twice the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The deployment: where it answers, and the process that drives it."""

    base_url: str
    place: Path
    cluster_id: str
    driver: subprocess.Popen[str]

    def __call__(self, what: str, *arguments: object) -> Any:  # noqa: ANN401
        """Have the driver do something; raises what it raised, as text."""
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        self.driver.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.driver.stdin.flush()
        said = json.loads(self.driver.stdout.readline())
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["result"]

    def find(self, *roles: str) -> list[Process]:
        """Return the processes of some roles."""
        return [each for each in processes(self.cluster_id) if each.role in roles]

    def wait_until_whole(self) -> None:
        """Wait until all replicas run again, and decode has been answered by either of the two."""
        deadline = time.monotonic() + REPAIR_LIMIT_S
        running: object = None
        reached: set[str] = set()
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                running = self("running")
                if running == WHOLE and len(self.find("prefill", "decode")) == 3:
                    reached |= self._reached()
                    if len(reached) == 2:
                        return
            time.sleep(0.2)
        pytest.fail(f"not whole again: {running}, {reached}")

    def _reached(self) -> set[str]:
        """Return the prefill replica that one more request goes to, if one does."""
        body = {"prompt": [2500], "max_tokens": 1}
        order = {"prefill_deadline_s": 9.0, "kv_wait_deadline_s": 9.0}
        phases, *_ = self("answer", "completions", body, order)
        return {phases["prefill_replica"]} if phases.get("prefill_replica") else set()

    def wait_until_released(self) -> None:
        """Wait until no request holds KV cache."""
        deadline = time.monotonic() + RELEASE_LIMIT_S
        held: object = None
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                held = self("held")
                if held == 0:
                    return
            time.sleep(1)
        pytest.fail(f"{held} replicas still hold KV cache")


@pytest.fixture(scope="package")
def reference(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, pytestconfig: pytest.Config
) -> Reference:
    """Return what a bare server answers: to 50 prompts, or to 200 of a thorough run."""
    place = tmp_path_factory.mktemp("reference")
    num_prompts = 200 if pytestconfig.getoption("--thorough") else 50
    return ask_bare_server(demo_model, num_prompts=num_prompts, log=place / "server.txt")


@pytest.fixture(scope="package")
def split(
    tmp_path_factory: pytest.TempPathFactory,
    demo_model: Path,
    make_deployment: DeploymentMaker,
    make_pool: PoolMaker,
) -> Iterator[Split]:
    """Have it up."""
    place = tmp_path_factory.mktemp("split")
    # Two nodes with one core each, which is the same core: the second is for failures, not speed.
    nodes = (Placement(node="laptop", gpus=(0,)), Placement(node="second", gpus=(0,)))
    # Little KV cache: all of it has been used, and takes memory, soon after a start.
    prefill = make_pool("prefill", dtype="fp32", replicas=2, placement=nodes, kv_bytes=96e6)
    decode = make_pool("decode", (1,), dtype="fp32")
    deployment = make_deployment(demo_model, dtype="fp32", prefill=prefill, decode=decode)
    (place / "deployment.json").write_text(to_json(deployment))
    [port] = free_ports(1)
    up = [sys.executable, str(HERE / "driver.py"), "up", "deployment.json", str(port)]
    with (place / "up.txt").open("w") as said:
        code = run_child(up, cwd=place, stdout=said, stderr=said)
    try:
        assert code == 0, (place / "up.txt").read_text()
        state = json.loads((place / ".minicluster/serving/state.json").read_text())
        ask = [sys.executable, str(HERE / "driver.py")]
        pipe = subprocess.PIPE
        with (
            (place / "driver.txt").open("w") as said,
            subprocess.Popen(
                ask, cwd=place, stdin=pipe, stdout=pipe, stderr=said, text=True
            ) as driver,
        ):
            yield Split(
                base_url=f"http://127.0.0.1:{port}",
                place=place,
                cluster_id=state["cluster_id"],
                driver=driver,
            )
    finally:
        down = [sys.executable, "-m", "serving.cli", "down"]
        subprocess.run(down, cwd=place, check=True, env=os.environ)
    assert marked(state["cluster_id"]) == set(), "processes left"
