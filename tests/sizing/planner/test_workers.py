"""Worker processes: answers are the same whatever their number, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minicluster.errors import InputError
from minicluster.plan import to_json
from sizing.planner.plan import plan
from sizing.planner.studies.decisions import decisions
from sizing.planner.studies.grid import Swept
from sizing.planner.studies.split_map import split_map
from sizing.planner.workers import Workers
from sizing.scenario import Scenario

QUICK = {"workload.requests_per_s": 2}


@pytest.mark.parametrize("scenario", ["llama-3.1-8b-h100", "llama-3.1-70b-h100"])
def test_a_plan_is_the_same_to_the_last_byte(scenario: str) -> None:
    inputs = Scenario.load(scenario)
    alone = to_json(plan(inputs))
    for jobs in (2, 3):
        with Workers.beside(jobs) as workers:
            assert to_json(plan(inputs, workers=workers)) == alone
    assert not multiprocessing.active_children()


def test_studies_are_the_same() -> None:
    inputs = Scenario.load("llama-3.1-8b-h100", QUICK)
    link = Swept(key="link_bytes_per_s", values=("5e10", "1e9"))
    ratio = Swept(key="prompt_answer_ratio", values=("1", "16"))
    with Workers.instead(2) as workers:
        assert split_map(inputs, ratio, link, workers=workers) == split_map(inputs, ratio, link)
        only = ["rate", "weights"]
        assert decisions(inputs, only=only, workers=workers) == decisions(inputs, only=only)


def test_one_job_starts_no_process() -> None:
    with Workers.instead(1) as workers:
        assert [*workers.map(_pid, range(3))] == [os.getpid()] * 3
        assert workers.later(_pid, 0)() == os.getpid()


def test_answers_come_in_order_and_from_others() -> None:
    with Workers.instead(2) as workers:
        assert [*workers.map(abs, range(-9, 0))] == [*range(9, 0, -1)]
        assert os.getpid() not in workers.map(_pid, range(4))


def test_a_question_is_as_it_was_when_it_was_asked() -> None:
    """The asker goes on, and may change what it asked about."""
    things = list(range(200_000))
    with Workers(1) as workers:
        ask = workers.later(len, things)
        things.append(0)
        assert ask() == 200_000


def test_what_a_worker_refuses_is_said_as_here() -> None:
    error = InputError("a key", 3, "an even number", "take 4")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301  (our own)
    with (
        Workers.instead(2) as workers,
        pytest.raises(InputError, match="a key is 3; it has to be an"),
    ):
        list(workers.map(_refuse, [error]))


def test_a_worker_that_is_killed_costs_time_only() -> None:
    with Workers.beside(2) as workers:
        assert workers.later(_killed_unless, os.getpid())() == os.getpid()


def test_a_killed_study_says_what_to_do() -> None:
    with Workers.instead(2) as workers, pytest.raises(InputError, match="--jobs 1"):
        list(workers.map(_killed_unless, [0]))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(sent: signal.Signals) -> None:
    """Ctrl-C ends all workers, and a parent that is killed takes them with it."""
    code = (
        "import os, time\n"
        "from sizing.planner.workers import Workers\n"
        "def told(n):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(60)\n"
        "with Workers.instead(2) as workers: list(workers.map(told, [1, 2]))\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        pids = [int(started.stdout.readline()) for _ in range(2)]
        os.killpg(started.pid, sent) if sent == signal.SIGINT else started.kill()
    until = time.monotonic() + 30
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < until, "a worker is left"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def _pid(_: int) -> int:
    return os.getpid()


def _refuse(error: InputError) -> None:
    raise error


def _killed_unless(pid: int) -> int:
    if os.getpid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)
    return pid
