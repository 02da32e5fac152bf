"""
The load by Locust: the only module that imports it, and it runs in processes of its own.

Importing Locust monkey-patches sockets, so `loadtest.client.launch` starts it as
`LOADTEST_DIR=DIR python -m loadtest.client.locustfile`. With Locust's own web interface, or spread
over machines: `LOADTEST_DIR=DIR locust -f loadtest/client/locustfile.py`, with `--processes`,
`--master` and `--worker` as Locust has them; the folder has to be there for each of them.
"""

from __future__ import annotations

# isort: off
import locust  # first: it patches the standard library
import gevent

# isort: on
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from gevent.event import Event
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest.client.coordinator import Coordinator, WorkerProcess
from loadtest.client.request import connections
from loadtest.run.client_health import SHORT
from loadtest.run.job import read_job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from locust.runners import Runner

PRIORITY = -10
WATCH_S = 0.2
QUIT_S = 5.0
FOLDER = Path(os.environ["LOADTEST_DIR"])
JOB = read_job(FOLDER / "run.json")


class Sender(locust.FastHttpUser):  # type: ignore[misc]
    """One user a process: it dispatches the process's share of the schedule, waiting for none."""

    host = JOB.host
    client_pool = connections(JOB)

    @locust.task  # type: ignore[untyped-decorator]
    def run_schedule(self) -> None:
        """Run the schedule once, then wait for Locust to stop this user."""
        player: WorkerProcess = self.environment.player
        if not player.playing:  # one for each process is enough
            try:
                http = self.client.client.clientpool.get_client(self.host)
                player.play(http, self.environment.events.request)
            except Exception:  # noqa: BLE001  (Locust would log it and start over)
                traceback.print_exc()
                self.environment.process_exit_code = 1
                self.environment.runner.quit()
        Event().wait()


class OneEach(locust.LoadTestShape):  # type: ignore[misc]
    """One user for each process; the schedule, not the number of users, is the load."""

    _users = 0

    def reset_time(self) -> None:
        """Begin a run."""
        super().reset_time()
        self._users = max(1, self.runner.worker_count)
        self.runner.environment.conductor.finished.clear()

    def tick(self) -> tuple[int, float] | None:
        """Return how many users there are to be; `None` after the run."""
        over = self.runner.environment.conductor.finished.is_set()
        return None if over else (self._users, 100.0)


@locust.events.init.add_listener  # type: ignore[untyped-decorator]
def take_part(environment: Environment, **_: object) -> None:
    """Make this process a player, or the conductor, or both where it is the only one."""
    runner = environment.runner
    if not isinstance(runner, MasterRunner):
        environment.player = WorkerProcess(runner, JOB, FOLDER)
    if not isinstance(runner, WorkerRunner):
        conductor = environment.conductor = Coordinator(runner, JOB, FOLDER)

        def all_there(**_: object) -> None:
            conductor.start(_players(runner))

        environment.events.spawning_complete.add_listener(all_there)
        if isinstance(runner, MasterRunner):
            gevent.spawn(_count_players, runner, conductor)


def _players(runner: Runner) -> tuple[str, ...]:
    """Name the processes that send."""
    if not isinstance(runner, MasterRunner):
        return ("local",)  # as LocalRunner signs its messages
    clients = runner.clients
    return tuple(sorted(c.id for c in (*clients.ready, *clients.spawning, *clients.running)))


def _count_players(runner: MasterRunner, conductor: Coordinator) -> None:
    """Tell *conductor* who is there: no more who quit, or was silent for 5 s, dead or frozen."""
    while True:
        gevent.sleep(WATCH_S)
        conductor.reckon_with(_players(runner))


def main() -> int:
    """Run the job without Locust's web interface; return the exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each stream is an open file
    with contextlib.suppress(OSError):
        # On one machine with the engines, whoever stamps late stamps wrong; not all users may.
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    environment = Environment(
        user_classes=[Sender], shape_class=OneEach(), events=locust.events, stop_timeout=None
    )
    if sys.argv[1:2] == ["--worker"]:
        return _work(environment, sys.argv[2], int(sys.argv[3]))
    workers: list[subprocess.Popen[bytes]] = []
    if JOB.workers > 1:
        runner = environment.create_master_runner("127.0.0.1", 0)
        workers = [_worker(runner.server.port) for _ in range(JOB.workers)]
    else:
        runner = environment.create_local_runner()
    locust.events.init.fire(environment=environment, runner=runner, web_ui=None)
    conductor: Coordinator = environment.conductor
    conductor.tell = _say
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, conductor.end, "interrupted")
    gevent.spawn(_end_with_parent, conductor.end)
    _conduct(runner, conductor, workers)
    runner.quit()
    for worker in workers:
        _see_off(worker)
    # A run that never began has nothing to say of its client.
    return environment.process_exit_code or int(not (FOLDER / "client.json").exists())


def _conduct(
    runner: Runner, conductor: Coordinator, workers: Sequence[subprocess.Popen[bytes]]
) -> None:
    """Start the run when all *workers* are there, and wait for its end."""
    while runner.worker_count < JOB.workers:
        if _dead(workers) or conductor.finished.wait(WATCH_S):
            return
    runner.start_shape()
    while not conductor.finished.wait(WATCH_S) and not runner.environment.process_exit_code:
        if _dead(workers):
            conductor.end(SHORT)  # at once; Locust needs its 5 s


def _say(progress: dict[str, float]) -> None:
    """Say on stdout, a JSON line each time, how far the run is."""
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more; see _end_with_parent
        sys.stdout.write(json.dumps(progress) + "\n")
        sys.stdout.flush()


def _worker(port: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "loadtest.client.locustfile",
        "--worker",
        "127.0.0.1",
        str(port),
    ]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)  # noqa: S603


def _work(environment: Environment, host: str, port: int) -> int:
    """Be a worker of the master at *host*, until it says that it is over."""
    runner = environment.create_worker_runner(host, port)
    locust.events.init.fire(environment=environment, runner=runner, web_ui=None)
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, lambda: None)  # the master's business

    def orphaned(why: str) -> None:
        environment.player.end(why)
        gevent.spawn_later(WATCH_S, runner.quit)

    gevent.spawn(_end_with_parent, orphaned)
    runner.greenlet.join()
    return environment.process_exit_code or 0


def _end_with_parent(end: Callable[[str], None]) -> None:
    """Stop once nobody waits for the result."""
    parent = os.getppid()
    while os.getppid() == parent:
        gevent.sleep(WATCH_S)
    end("orphaned")


def _dead(workers: Sequence[subprocess.Popen[bytes]]) -> bool:
    return any(worker.poll() is not None for worker in workers)


def _see_off(worker: subprocess.Popen[bytes]) -> None:
    """Wait for *worker*, which has been told to quit, and then no more."""
    try:
        worker.wait(QUIT_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
