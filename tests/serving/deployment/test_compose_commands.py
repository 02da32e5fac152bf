"""The shell commands of docker-compose.yml, run with stand-ins for `ray` and `serving`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import until

COMPOSE = Path(__file__).parents[3] / "docker-compose.yml"
LIMIT_S = 60.0

RAY = """#!/bin/bash
if [ "$1" = health-check ]; then [ -e "$0.started" ]; exit; fi
echo "$*" >> "$LOG"; touch "$0.started"
trap 'echo "ray ended" >> "$LOG"; exit 0' TERM
while [ ! -e "$LOG.ray-dies" ]; do sleep 0.1; done
exit 1
"""
SERVING = """#!/bin/bash
echo "serving $1" >> "$LOG"
[ "$1" = down ] && exit 0
trap 'echo "up ended" >> "$LOG"; exit 143' TERM
while [ -e "$LOG.up-waits" ]; do sleep 0.1; done
[ ! -e "$LOG.up-fails" ]
"""


class Container:
    """A service's process, and what it called."""

    def __init__(self, place: Path, service: str, *marks: str) -> None:
        self._log = place / "log"
        for name, text in {"ray": RAY, "serving": SERVING, "hostname": "#!/bin/sh\n"}.items():
            (place / name).write_text(text)
            (place / name).chmod(0o755)
        for each in marks:
            self.mark(each)
        found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"][service]
        self.process = subprocess.Popen(
            [part.replace("$$", "$") for part in found["command"]],
            env={"PATH": f"{place}:{os.environ['PATH']}", "LOG": str(self._log)},
            cwd=place,
        )

    def mark(self, what: str) -> None:
        Path(f"{self._log}.{what}").touch()

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def wait_for(self, call: str) -> None:
        until(lambda: call in self.calls, call, LIMIT_S)

    def end(self) -> int:
        return self.process.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("marks", "then"),
    [(("up-fails",), None), ((), "ray-dies"), (("up-waits",), "ray-dies")],
    ids=["up fails", "Ray dies", "Ray dies before up returns"],
)
def test_a_head_that_fails_ends(tmp_path: Path, marks: tuple[str, ...], then: str | None) -> None:
    """Docker starts again what has ended, and nothing else."""
    head = Container(tmp_path, "head", *marks)
    head.wait_for("serving up")
    if then is not None:
        time.sleep(0.5)
        assert head.process.poll() is None
        head.mark(then)
    assert head.end() != 0
    (tmp_path / "log.up-waits").unlink(missing_ok=True)
    head.mark("ray-dies")


@pytest.mark.parametrize("starting", [True, False])
def test_a_head_drains_at_sigterm(tmp_path: Path, *, starting: bool) -> None:
    """`docker compose stop`: a start is interrupted, `serving down` drains, and Ray comes last."""
    head = Container(tmp_path, "head", *(["up-waits"] if starting else []))
    head.wait_for("serving up")
    time.sleep(0.5)
    head.process.send_signal(signal.SIGTERM)
    assert head.end() == 0
    started, *others = head.calls
    assert started.startswith("start --head ")
    interrupted = ["up ended"] if starting else []
    assert others == ["serving up", *interrupted, "serving down", "ray ended"]


def test_a_worker_waits_for_its_head(tmp_path: Path) -> None:
    """It becomes Ray's own process, which gets the signals."""
    worker = Container(tmp_path, "decode-node-0")
    time.sleep(0.5)
    assert worker.calls == []
    (tmp_path / "ray.started").touch()
    until(lambda: bool(worker.calls), "Ray starts", LIMIT_S)
    assert worker.calls[0].startswith("start --address=head:6379 ")
    time.sleep(0.5)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 0
    assert worker.calls[-1] == "ray ended"
