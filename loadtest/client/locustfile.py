"""
The Locust processes that send the load; no other module imports Locust.

Importing Locust monkey-patches sockets, so `loadtest.client.launch` starts this module as
`LOADTEST_DIR=DIR python -m loadtest.client.locustfile`. Locust's own command runs it with a web
interface or on several machines: `LOADTEST_DIR=DIR locust -f loadtest/client/locustfile.py` takes
`--processes`, `--master` and `--worker`; the folder has to exist on each machine.
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
from locust.runners import MasterRunner, Runner, WorkerRunner

from loadtest.client.coordinator import Coordinator, WorkerProcess
from loadtest.client.request import connections
from loadtest.run.client_health import LOST_WORKER
from loadtest.run.job import read_job
from minicluster.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PRIORITY = -10  # niceness where permitted: on the engines' machine a late client stamps tokens late
POLL_S = 0.2  # interval of the checks for lost processes
QUIT_S = 5.0  # time that a worker has to leave before it is killed

FOLDER = Path(os.environ["LOADTEST_DIR"])
PARENT = int(os.environ.get("LOADTEST_PARENT", os.getppid()))
"""Process that waits for the result. It may be gone before this module is loaded, so it says."""

JOB = read_job(FOLDER / "run.json").by_the_clock()


class Sender(locust.FastHttpUser):  # type: ignore[misc]
    """The one user of a process: it sends the process's share of the schedule, open loop."""

    host = JOB.host
    client_pool = connections(JOB)

    @locust.task  # type: ignore[untyped-decorator]
    def run_schedule(self) -> None:
        """Run the schedule once, then wait for Locust to stop this user."""
        worker: WorkerProcess = self.environment.worker_process
        if not worker.running:  # Locust may start more than one user
            try:
                http = self.client.client.clientpool.get_client(self.host)
                worker.run(http, self.environment.events.request)
            except Exception:  # noqa: BLE001  (Locust would log it and start over)
                self.environment.process_exit_code = 1
                with contextlib.suppress(OSError):  # stderr is a pipe, whose reader may be gone
                    traceback.print_exc()
                self.environment.runner.quit()
        Event().wait()


class OneUserPerProcess(locust.LoadTestShape):  # type: ignore[misc]
    """One user for each process; the schedule, not the number of users, is the load."""

    _users = 0

    def reset_time(self) -> None:
        """Begin a run."""
        super().reset_time()
        self._users = max(1, self.runner.worker_count)
        self.runner.environment.coordinator.finished.clear()

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users and their spawn rate; `None` after the run."""
        over = self.runner.environment.coordinator.finished.is_set()
        return None if over else (self._users, 100.0)


@locust.events.init.add_listener  # type: ignore[untyped-decorator]
def assign_roles(environment: Environment, **_: object) -> None:
    """Make this process a worker, or the coordinator, or both where it is the only one."""
    runner = environment.runner
    if not isinstance(runner, MasterRunner):
        environment.worker_process = WorkerProcess(runner, JOB, FOLDER)
    if not isinstance(runner, WorkerRunner):
        coordinator = environment.coordinator = Coordinator(runner, JOB, FOLDER)

        def start(**_: object) -> None:
            coordinator.start(_workers(runner))

        environment.events.spawning_complete.add_listener(start)
        if isinstance(runner, MasterRunner):
            gevent.spawn(_drop_missing_workers, runner, coordinator)


def _workers(runner: Runner) -> tuple[str, ...]:
    if not isinstance(runner, MasterRunner):
        return ("local",)  # as LocalRunner signs its messages
    clients = runner.clients
    return tuple(sorted(c.id for c in (*clients.ready, *clients.spawning, *clients.running)))


def _drop_missing_workers(runner: MasterRunner, coordinator: Coordinator) -> None:
    """Report the present workers: Locust drops those that quit, or were silent for 5 s."""
    while True:
        gevent.sleep(POLL_S)
        coordinator.drop_missing(_workers(runner))


def main() -> int:
    """Run the job without Locust's web interface; return the exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each stream is an open file
    with contextlib.suppress(OSError):  # not every user may
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    environment = Environment(
        user_classes=[Sender],
        shape_class=OneUserPerProcess(),
        events=locust.events,
        stop_timeout=None,
    )
    if sys.argv[1:2] == ["--worker"]:
        return _run_worker(environment, sys.argv[2], int(sys.argv[3]))
    workers: list[subprocess.Popen[bytes]] = []
    if JOB.workers > 1:
        runner = environment.create_master_runner("127.0.0.1", 0)
        workers = [_launch_worker(runner.server.port) for _ in range(JOB.workers)]
    else:
        runner = environment.create_local_runner()
    locust.events.init.fire(environment=environment, runner=runner, web_ui=None)
    coordinator: Coordinator = environment.coordinator
    coordinator.report = _print_progress
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, coordinator.end, "interrupted")
    gevent.spawn(_end_with_parent, coordinator.end)
    _coordinate(runner, coordinator, workers)
    runner.quit()
    for worker in workers:
        try:
            worker.wait(QUIT_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    if coordinator.write_error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"the results cannot be written: {coordinator.write_error}\n")
        return Exit.BAD_INPUT
    # A run that never began has written no client.json.
    return environment.process_exit_code or int(not (FOLDER / "client.json").exists())


def _coordinate(
    runner: Runner, coordinator: Coordinator, workers: Sequence[subprocess.Popen[bytes]]
) -> None:
    while runner.worker_count < JOB.workers:
        if _any_ended(workers) or coordinator.finished.wait(POLL_S):
            return
    runner.start_shape()
    while not coordinator.finished.wait(POLL_S) and not runner.environment.process_exit_code:
        if _any_ended(workers):
            coordinator.end(LOST_WORKER)  # at once; Locust needs its 5 s


def _print_progress(progress: dict[str, float]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent is gone; see _end_with_parent
        sys.stdout.write(json.dumps(progress) + "\n")
        sys.stdout.flush()


def _launch_worker(port: int) -> subprocess.Popen[bytes]:
    module = [sys.executable, "-m", "loadtest.client.locustfile"]
    command = [*module, "--worker", "127.0.0.1", str(port)]
    environment = os.environ | {"LOADTEST_PARENT": str(os.getpid())}
    return subprocess.Popen(  # noqa: S603  (our own module)
        command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr
    )


def _run_worker(environment: Environment, host: str, port: int) -> int:
    runner = environment.create_worker_runner(host, port)
    locust.events.init.fire(environment=environment, runner=runner, web_ui=None)
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, lambda: None)  # the master ends the run

    def leave(reason: str) -> None:
        environment.worker_process.end(reason)
        gevent.spawn_later(POLL_S, runner.quit)

    gevent.spawn(_end_with_parent, leave)
    runner.greenlet.join()
    return environment.process_exit_code or 0


def _end_with_parent(end: Callable[[str], None]) -> None:
    while os.getppid() == PARENT:
        gevent.sleep(POLL_S)
    end("orphaned")


def _any_ended(workers: Sequence[subprocess.Popen[bytes]]) -> bool:
    return any(worker.poll() is not None for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
