"""Deployments of a plan by `serving up`, each in a directory of its own, and what checks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from minicluster.command import run_child
from minicluster.plan import Deployment, Plan, to_json
from serving.cluster.ports import free_ports
from serving.cluster.processes import cluster_processes
from tests.waiting import until

from .command import SERVING, serving
from .faults.processes import Process, processes

HERE = Path(__file__).parent

REPAIR_LIMIT_S = 400.0
"""Within which Ray Serve starts again what a test has killed, on a busy machine too."""


@contextmanager
def up(
    place: Path,
    plan: Plan | Deployment,
    *options: str,
    command: Sequence[str] = SERVING,
    **environment: str,
) -> Iterator[str]:
    """
    Have a plan deployed from *place*, and nothing left of it afterwards.

    Args:
        place: the current directory of the commands.
        plan: what to deploy.
        options: further options of `serving up`.
        command: what deploys.
        environment: further variables of its environment.

    Yields:
        The base URL of the endpoint.
    """
    (place / "plan.json").write_text(to_json(plan))
    [port] = free_ports(1)
    with (place / "up.txt").open("w") as said:
        line = [*command, "up", "plan.json", "--port", str(port), *options]
        # Not `subprocess.run`, which at Ctrl-C would kill it before it has stopped Ray again.
        code = run_child(line, cwd=place, stdout=said, stderr=said, env=os.environ | environment)
    assert code == 0, (place / "up.txt").read_text()
    cluster_id = json.loads((place / ".minicluster/serving/state.json").read_text())["cluster_id"]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        done = serving(place, "down")
    assert done.returncode == 0, done.stderr
    assert cluster_processes(cluster_id) == set(), "processes left"
    assert {file.name for file in (place / ".minicluster/serving").iterdir()} == {"logs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A deployment of two pools: where it answers, and the process that asks its insides."""

    base_url: str
    place: Path
    replicas: dict[str, int]
    deadline_s: float
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
        state = json.loads((self.place / ".minicluster/serving/state.json").read_text())
        return [each for each in processes(state["cluster_id"]) if each.role in roles]

    def wait_until_whole(self) -> None:
        """Wait until all replicas run again, and each of prefill works with each of decode."""
        whole = {f"{role.capitalize()}:demo": number for role, number in self.replicas.items()}
        pairs = self.replicas["prefill"] * self.replicas["decode"]

        def holds() -> bool:
            with suppress(RuntimeError):
                num_found = len(self.find(*self.replicas))
                running = self("running") == {**whole, "Gate": 1, "Ingress": 1}
                if running and num_found == sum(self.replicas.values()):
                    return bool(self("pairs", self.replicas["prefill"]) == pairs)
            return False

        until(holds, f"whole again: {whole}", REPAIR_LIMIT_S)

    def wait_until_inside(self, number: int) -> None:
        """Wait until the endpoint has so many requests under way."""
        until(lambda: outstanding(self.base_url) == number, f"{number} requests inside")

    def wait_until_decoding(self, number: int, whole: int = 0) -> None:
        """
        Wait until so many requests are under way, each with its first token.

        Of *whole* answers the endpoint does not see it: they come in one piece.
        """
        self.wait_until_inside(number)
        waiting = 'minicluster_outstanding_requests{stage="prefill"}'
        until(lambda: series(self.base_url)[waiting] <= whole, "no request without a token")

    def wait_until_released(self) -> None:
        """Wait until no request is under way, and none holds KV cache."""
        until(lambda: outstanding(self.base_url) == 0, "no request under way")

        def free() -> bool:
            with suppress(RuntimeError):
                return bool(self("held") == 0)
            return False

        until(free, "no replica holds KV cache")


@contextmanager
def driven(
    place: Path, plan: Plan | Deployment, deadline_s: float, *options: str, **environment: str
) -> Iterator[Split]:
    """
    Have a plan deployed whose KV transfers tests can spoil, and a driver beside it.

    Args:
        place: the current directory of the commands.
        plan: what to deploy.
        deadline_s: of prefill and of the KV hand-off.
        options: further options of `serving up`.
        environment: further variables of its environment.
    """
    deadlines = ("--prefill-deadline", str(deadline_s), "--kv-deadline", str(deadline_s))
    spoiled = (sys.executable, str(HERE / "faults/spoiled.py"))
    pipe = subprocess.PIPE
    with (
        up(place, plan, *deadlines, *options, command=spoiled, **environment) as base_url,
        (place / "driver.txt").open("w") as said,
        subprocess.Popen(
            [sys.executable, str(HERE / "faults/driver.py")],
            cwd=place,
            stdin=pipe,
            stdout=pipe,
            stderr=said,
            text=True,
        ) as driver,
    ):
        yield Split(
            base_url=base_url,
            place=place,
            # Of a simulated group one process has all ranks.
            replicas={
                pool.role: pool.replicas if "simulated" in options else pool.engines
                for pool in plan.pools
            },
            deadline_s=deadline_s,
            driver=driver,
        )


class Shared:
    """
    The deployment that most engine tests use: started once, when the first of them asks for it.

    Tests that deploy something else end it first: the cores are two. What asks later has it
    started again.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[Split]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._split: Split | None = None
        self._failed: BaseException | None = None

    def get(self) -> Split:
        """Return it; once it did not start, it is not tried again."""
        if self._failed is not None:
            raise self._failed
        if self._split is None:
            try:
                self._split = self._stack.enter_context(self._start())
            except BaseException as error:
                self._failed = error
                raise
        return self._split

    def end(self) -> None:
        self._split = None
        self._stack.close()


def series(base_url: str) -> dict[str, float]:
    with urlopen(f"{base_url}/metrics", timeout=60) as answer:  # noqa: S310  (our own endpoint)
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def healthy(base_url: str) -> bool:
    """Tell whether a server is up."""
    with suppress(OSError), urlopen(f"{base_url}/health", timeout=60) as answer:  # noqa: S310
        return bool(answer.status == 200)
    return False


def outstanding(base_url: str) -> float:
    """Return how many requests are under way, as the endpoint itself counts them."""
    return series(base_url)['minicluster_outstanding_requests{stage="all"}']
