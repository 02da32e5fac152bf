"""One run shared by one or several processes: a coordinator starts workers, gathers and ends."""

from __future__ import annotations

# isort: off
import gevent  # first: what follows imports a patched standard library

# isort: on
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gevent.event import AsyncResult, Event

from loadtest.client.dispatcher import Dispatcher
from loadtest.client.stream import StreamError
from loadtest.run.client_health import (
    KILLED,
    LOST_WORKER,
    UNWRITABLE,
    Client,
    merged,
    new_client,
    write_client,
)
from loadtest.run.schedule import share
from minicluster.errors import InputError
from minicluster.units import scaled
from minicluster.workload.samples import Sample, to_line
from minicluster.workload.schedule import read_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from geventhttpclient.client import HTTPClient
    from locust.runners import Runner

    from loadtest.run.job import Job

LEAD_IN_S = 0.3  # time between the start signal and the start: the signal has to reach every worker
REPORT_S = 0.5  # interval of the workers' reports; Locust gives up a worker that is silent for 5 s


class WorkerProcess:
    """
    The part of each sending process: it waits for the start signal, sends its share, reports.

    Messages go through Locust's runner, which delivers them in this process or over its network.
    Their names are none of Locust's own, such as `stop`.
    """

    def __init__(self, runner: Runner, job: Job, folder: Path) -> None:
        self._runner, self._job, self._folder = runner, job, folder
        self._start: AsyncResult[dict[str, Any]] = AsyncResult()
        self._dispatcher: Dispatcher | None = None
        self._lines: list[str] = []
        self.running = False
        runner.register_message("start_run", lambda msg, **_: self._start.set(msg.data))
        runner.register_message("end_run", lambda msg, **_: self.end(msg.data["reason"]))

    def run(self, http: HTTPClient, request_event: Any) -> None:  # noqa: ANN401  (Locust's own)
        """Send this process's share of one run through *http*."""
        self.running = True
        try:
            self._run(http, request_event)
        finally:
            self._start, self._dispatcher, self.running = AsyncResult(), None, False

    def _run(self, http: HTTPClient, request_event: Any) -> None:  # noqa: ANN401
        # In a thread: Locust gives up a worker whose event loop is blocked for seconds.
        reading = gevent.get_hub().threadpool.spawn(read_schedule, self._folder / "schedule.jsonl")
        schedule = [scaled(request, self._job.slowdown or 1.0) for request in reading.get()]
        start = self._start.get()

        def record(sample: Sample) -> None:
            self._lines.append(to_line(sample))
            if not dispatcher.window_left:
                self._report(dispatcher)
            request_event.fire(
                request_type="POST",
                name="/v1/completions",
                response_time=1000 * (sample.end_s - sample.due_s),
                response_length=sample.output_tokens or 0,
                exception=None if sample.ok else StreamError(sample.outcome, sample.detail or ""),
                context={},
            )

        self._dispatcher = dispatcher = Dispatcher(
            replace(self._job, prompt_salt=start["salt"]),
            share(schedule, start["part"], start["parts"]),
            http,
            origin_s=time.monotonic() + start["unix_s"] - time.time(),
            record=record,
        )
        reporter = gevent.spawn(self._keep_reporting, dispatcher)
        client = dispatcher.run()
        reporter.kill()
        self._report(dispatcher)
        self._runner.send_message("client", asdict(client))
        if dispatcher.killed:
            raise gevent.GreenletExit

    def end(self, reason: str) -> None:
        """End this process's share."""
        if self._dispatcher:
            self._dispatcher.end(reason)

    def _keep_reporting(self, dispatcher: Dispatcher) -> None:
        while True:
            self._report(dispatcher)
            gevent.sleep(REPORT_S)

    def _report(self, dispatcher: Dispatcher) -> None:
        lines, self._lines = self._lines, []
        counts = {"sent": dispatcher.sent, "done": dispatcher.done, "failed": dispatcher.failed}
        report = {"lines": lines, "t_s": dispatcher.now(), "left": dispatcher.window_left}
        self._runner.send_message("progress", report | counts)


class Coordinator:
    """
    The part of one process: it sends the start signals, gathers the results and ends the run.

    Attributes:
        finished: set when the run is over, and all that could be written is.
        write_error: the first that ended the run, or that kept its results from being written.
        report: called with the progress of all workers together.
    """

    def __init__(self, runner: Runner, job: Job, folder: Path) -> None:
        self._runner, self._job, self._folder = runner, job, folder
        self.finished = Event()
        self.write_error: OSError | InputError | None = None
        self._unwritten = bytearray()
        self._workers: tuple[str, ...] = ()
        self._reports: dict[str, dict[str, float]] = {}
        self._clients: dict[str, Client] = {}
        self._stopping = self._running = self._cancelled = False
        self._lost_worker = False
        self.report: Callable[[dict[str, float]], None] = lambda _: None
        runner.register_message("progress", self._on_report)
        runner.register_message("client", self._on_client)

    def start(self, workers: tuple[str, ...]) -> None:
        """Send the start signal to *workers*, client ids of Locust; once for each run."""
        if self._running or self._cancelled:
            return  # Locust fires its event again after a worker came or left
        self._running, self._lost_worker, self.write_error = True, False, None
        self._workers, self._reports, self._clients, self._stopping = workers, {}, {}, False
        self._unwritten.clear()
        started_s = time.time()
        at_first = new_client(KILLED, started_unix_s=started_s, origin_monotonic_s=time.monotonic())
        try:
            # Without a buffer, so that the end of what is on a full disk is known.
            self._samples = (self._folder / "samples.jsonl").open("wb", buffering=0)
            write_client(at_first, self._folder / "client.json")
        except (OSError, InputError) as error:
            self.write_error, self._running = error, False
            self.finished.set()
            return
        # The salt makes the prompts of this run its own; each worker sends a part of the schedule.
        start = {
            "unix_s": started_s + LEAD_IN_S,
            "parts": len(workers),
            "salt": self._job.prompt_salt ^ time.time_ns(),
        }
        for part, worker in enumerate(workers):
            self._runner.send_message("start_run", {**start, "part": part}, client_id=worker)

    def end(self, reason: str) -> None:
        """End the run in every process; a run that has not begun never begins."""
        if not self._running:
            self._cancelled = True
            self.finished.set()
        elif not self._stopping:
            self._stopping = True
            self._runner.send_message("end_run", {"reason": reason})

    def drop_missing(self, present: Sequence[str]) -> None:
        """End the run, which proves nothing, if a worker is not *present*; samples are kept."""
        present_or_done = tuple(w for w in self._workers if w in present or w in self._clients)
        if self._running and present_or_done != self._workers:
            self._workers, self._lost_worker = present_or_done, True
            self.end(LOST_WORKER)
            self._finish_if_all_reported()

    def _on_report(self, msg: Any, **_: object) -> None:  # noqa: ANN401  (Locust's own)
        if msg.node_id not in self._workers or not self._running:
            return  # a worker that was given up has come back
        report = dict(msg.data)
        self._unwritten += "".join(f"{line}\n" for line in report.pop("lines")).encode()
        if self.write_error is None:
            try:
                self._write_samples()
            except OSError as error:
                self.write_error = error
                self.end(UNWRITABLE)
        self._reports[msg.node_id] = report
        reports = self._reports.values()
        total = {key: sum(r[key] for r in reports) for key in ("sent", "done", "failed")}
        self.report({"t_s": max(r["t_s"] for r in reports)} | total)
        if len(self._reports) == len(self._workers) and not any(r["left"] for r in reports):
            self.end("complete")

    def _on_client(self, msg: Any, **_: object) -> None:  # noqa: ANN401
        if msg.node_id not in self._workers or not self._running:
            return
        client = Client(**msg.data | {"heartbeat_lag_s": tuple(msg.data["heartbeat_lag_s"])})
        self._clients[msg.node_id] = client
        if client.stop != "complete":
            self.end(client.stop)
        self._finish_if_all_reported()

    def _finish_if_all_reported(self) -> None:
        if self.finished.is_set() or any(w not in self._clients for w in self._workers):
            return
        self._running = False
        for write in (self._write_samples, self._write_client):
            try:
                write()
            except (OSError, InputError) as error:
                self.write_error = self.write_error or error
        self._samples.close()
        self.finished.set()

    def _write_client(self) -> None:
        if not self._clients:
            return
        client = merged(tuple(self._clients.values()))
        if self._lost_worker and client.stop == "complete":
            client = replace(client, stop=LOST_WORKER)  # one worker's report is missing
        write_client(client, self._folder / "client.json")

    def _write_samples(self) -> None:
        """Write what is left; an error leaves the rest for the end, when there may be room."""
        while self._unwritten:
            written = self._samples.write(self._unwritten)
            del self._unwritten[:written]
