"""The services of docker-compose.yml, each in a network namespace of its own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml

from minicluster.plan import to_json
from serving.cluster.processes import environment, stop
from serving.cluster.token import write_token
from tests.serving.deployed import Shared
from tests.serving.plans import make_deployment, make_plan
from tests.waiting import until

from .network import Host, network

ROOT = Path(__file__).parents[3]
START_S = 300
TOKEN_FILE = "ray-token"  # noqa: S105  (its name)
"""File of the cluster's token, on every host."""

TTFT_S = 5.0
"""The plan's limit: deadlines of prefill and of the KV hand-off are twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """The services that are up: one host each."""

    hosts: dict[str, Host]
    base_url: str
    place: Path

    @property
    def prefill(self) -> Host:
        return self.hosts["prefill-node-0"]

    @property
    def decode(self) -> Host:
        return self.hosts["decode-node-0"]

    def serving(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the head, as `docker compose exec head` would."""
        head = ("ip", "netns", "exec", self.hosts["head"].namespace)
        return subprocess.run(
            [*head, sys.executable, "-m", "serving.cli", *arguments],
            cwd=self.place,
            env=environment("", self.place / TOKEN_FILE),
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def compose(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory, shared: Shared
) -> Iterator[Compose]:
    """Start head and workers by the commands of docker-compose.yml; mounts alone differ."""
    if os.geteuid() != 0:
        pytest.fail("may not make network namespaces: be root, or --ignore=tests/serving/netns")
    shared.end()
    place = tmp_path_factory.mktemp("compose")
    plan = make_plan(make_deployment(demo_model))
    pools = tuple(
        replace(pool, placement=tuple(replace(p, node="node-0") for p in pool.placement))
        for pool in plan.pools
    )
    # As `make demo` names it: a path that leads nowhere from where the containers run.
    model = replace(plan.model, source=".minicluster/models/demo")
    plan = replace(plan, pools=pools, inputs=replace(plan.inputs, model=model))
    plan = plan.under(slo=replace(plan.slo, ttft_s=TTFT_S))
    (place / "plan.json").write_text(to_json(plan))
    write_token(place / TOKEN_FILE)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    nodes = {name: each for name, each in services.items() if "shm_size" in each}
    mounts = {"/etc/minicluster/plan.json": place / "plan.json", "/models/demo": demo_model}
    mark, ray_directory = secrets.token_hex(8), Path(mkdtemp(prefix="mc-", dir="/tmp"))
    processes: list[subprocess.Popen[bytes]] = []
    with network(tuple(nodes)) as hosts:
        try:
            for name, service in nodes.items():
                if name != "head":
                    _wait_for_ray(hosts["head"], environment(mark, place / TOKEN_FILE))
                # The token does not lie where a container has its secrets.
                env = {
                    **service["environment"],
                    **environment(mark, place / TOKEN_FILE),
                    "RAY_TMPDIR": str(ray_directory),
                }
                env["PATH"] = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
                command = _command(service, mounts)
                log = place / f"{name}.log"
                processes.append(hosts[name].start(command, env=env, cwd=place, log=log))
            _wait_until_ready(place / "head.log")
            yield Compose(hosts=hosts, base_url=f"http://{hosts['head'].address}:8000", place=place)
        finally:
            stop(mark, grace_s=0.5)
            for process in processes:
                process.wait()
            shutil.rmtree(ray_directory, ignore_errors=True)


def _command(service: dict[str, Any], mounts: Mapping[str, Path]) -> list[str]:
    """Return a service's command as its container would run it, with what it mounts from here."""
    command = [part.replace("$$", "$") for part in service["command"]]
    for there, here in mounts.items():
        command = [part.replace(there, str(here)) for part in command]
    # Beside what the file says: an endpoint process on each host.
    return [part.replace("--wait 120", "--wait 120 --endpoint-hosts 3") for part in command]


def _wait_for_ray(head: Host, env: dict[str, str]) -> None:
    """Wait as `depends_on: service_healthy` does."""
    inside = ("ip", "netns", "exec", head.namespace, sys.executable, "-m", "ray.scripts.scripts")
    check = [*inside, "health-check", "--address", f"{head.address}:6379"]

    def answers() -> bool:
        done = subprocess.run(check, env=env, capture_output=True, check=False)
        return done.returncode == 0

    until(answers, "the head's Ray answers", START_S)


def _wait_until_ready(log: Path) -> None:
    """Wait until `serving up` said that it is, or that it failed."""
    ends = re.compile("ready: http|serving: ")
    until(lambda: log.exists() and bool(ends.search(log.read_text())), "up", START_S)
    assert "ready: http" in log.read_text(), log.read_text()[-2000:]
