"""Ctrl-C at any moment of `serving up`: one line, exit code 130, nothing left, and up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minicluster.plan import Plan, to_json
from serving.cluster.ports import free_ports
from serving.cluster.processes import cluster_processes
from tests.serving.client import answers
from tests.serving.command import LIMIT_S, SERVING, serving
from tests.serving.deployed import up
from tests.serving.faults.processes import processes
from tests.waiting import until

from .conftest import plan_for_gpus

pytestmark = [pytest.mark.simulated, pytest.mark.campaign]

STATE = Path(".minicluster/serving")
SIMULATED = ("--engine", "simulated", "--slowdown", "30")
"""So slow that a round of probes takes longer than a look at what was said."""

LISTENS = ("env", "--default-signal=INT")
"""Starts a command that ends at Ctrl-C also where this run is a job in the background."""


class Start:
    """A `serving up` that is under way, in a process group of its own as in a terminal."""

    def __init__(self, place: Path) -> None:
        self._place = place
        [port] = free_ports(1)
        line = [*LISTENS, *SERVING, "up", "plan.json", "--port", str(port), *SIMULATED]
        with (place / "up.txt").open("w") as out:
            self.process = subprocess.Popen(
                line, cwd=place, stdout=out, stderr=out, process_group=0
            )

    @property
    def said(self) -> str:
        return (self._place / "up.txt").read_text()

    @property
    def state(self) -> dict[str, Any]:
        """What later commands know of it."""
        found: dict[str, Any] = json.loads((self._place / STATE / "state.json").read_text())
        return found

    def runs(self, role: str) -> bool:
        """Tell whether a process of this role is there."""
        if not (self._place / STATE / "state.json").exists():
            return False
        return any(each.role == role for each in processes(self.state["cluster_id"]))


def says(text: str) -> Callable[[Start], bool]:
    return lambda start: text in start.said


def runs(role: str) -> Callable[[Start], bool]:
    return lambda start: start.runs(role)


MOMENTS = {
    "Ray starts": says("starting Ray"),
    "its head runs": runs("gcs"),
    "its raylet runs": runs("raylet"),
    "Ray Serve is imported": says("loading Ray Serve"),
    "its controller runs": runs("controller"),
    "replicas start": says("starting engines"),
    "a replica runs": runs("decode"),
    "the endpoint runs": runs("ingress"),
    "probes begin": says("probing"),
    "probes end": says("2 of 3 rounds good"),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in which nothing is deployed after the test, passed or not."""
    yield tmp_path
    assert serving(tmp_path, "down").returncode == 0


def interrupt(place: Path, plan: Plan, moment: str, pressed: Sequence[signal.Signals]) -> None:
    """Interrupt a start in *place* at a moment, and see that it leaves nothing."""
    (place / "plan.json").write_text(to_json(plan))
    start = Start(place)
    until(lambda: MOMENTS[moment](start) or start.process.poll() is not None, moment)
    state = start.state
    for each in pressed:
        os.killpg(start.process.pid, each)
        time.sleep(0.2)
    code = start.process.wait(LIMIT_S)

    assert code == 130, start.said
    assert start.said.splitlines()[-2:] == ["stopping what was started", "serving: interrupted"]
    assert "Traceback" not in start.said
    assert cluster_processes(state["cluster_id"]) == set()
    assert not Path(state["session"]).exists()
    assert {file.name for file in (place / STATE).iterdir()} <= {"logs"}


@pytest.mark.parametrize(
    ("moment", "pressed"),
    [
        *((each, (signal.SIGINT,)) for each in MOMENTS),
        ("probes begin", (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_the_same_command_works_right_after_it_was_interrupted(
    place: Path, small_model: Path, moment: str, pressed: Sequence[signal.Signals]
) -> None:
    """At every moment, by Ctrl-C or SIGTERM; `make test` sees one moment in test_replace.py."""
    plan = plan_for_gpus(small_model, 1)
    interrupt(place, plan, moment, pressed)
    with up(place, plan, *SIMULATED) as base_url:
        assert answers(base_url)
