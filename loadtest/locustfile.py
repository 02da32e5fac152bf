"""
Open-loop load by Locust: the only module that imports it, and it runs in its own process.

Importing Locust monkey-patches sockets, so `loadtest.drive` starts it as
`LOADTEST_DIR=DIR python -m loadtest.locustfile`. With Locust's own web interface:
`LOADTEST_DIR=DIR locust -f loadtest/locustfile.py`, one user.
"""

from __future__ import annotations

# isort: off
import locust  # first: it patches the standard library
import gevent

# isort: on
import contextlib
import errno
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gevent.event import Event
from gevent.pool import Group
from geventhttpclient.client import HTTPClientPool
from geventhttpclient.response import HTTPParseError
from locust.env import Environment

from loadtest.client import Client, write_client
from loadtest.job import read_job
from loadtest.machine import machine, versions
from loadtest.samples import Sample, to_line
from loadtest.schedule import read_schedule
from loadtest.sse import EventParser
from loadtest.stream import CompletionStream, StreamError

if TYPE_CHECKING:
    from geventhttpclient.client import HTTPClient

    from loadtest.schedule import Request

LEAD_IN_S = 0.2
HEARTBEAT_S = 0.005
PROGRESS_S = 0.5
CLOSING_S = 1.0
DEAD_AFTER_REFUSALS = 5
DEAD_AFTER_S = 3.0
PRIORITY = -10
SHED = (429, 503)
PATH = "/v1/completions"
FOLDER = Path(os.environ["LOADTEST_DIR"])
JOB = read_job(FOLDER / "run.json")


class OpenLoop(locust.FastHttpUser):  # type: ignore[misc]
    """The one user: it dispatches every request of the schedule and waits for none."""

    host = JOB.host
    # One pool for any number of streams: Locust's own holds 10 connections and queues the rest.
    client_pool = HTTPClientPool(
        concurrency=1_000_000,
        insecure=True,
        connection_timeout=JOB.timeout_s,
        network_timeout=JOB.timeout_s,
    )

    @locust.task  # type: ignore[untyped-decorator]
    def run_schedule(self) -> None:
        """Run the schedule once, then end the test."""
        http = self.client.client.clientpool.get_client(self.host)
        try:
            Dispatcher(http, self.environment.events.request).run()
        except Exception:  # noqa: BLE001  (Locust would log it and start over)
            traceback.print_exc()
            self.environment.process_exit_code = 1
        finally:
            self.environment.runner.quit()


class Dispatcher:
    """
    Send each request at its due time, whatever has become of the earlier ones.

    Due times are absolute, so lateness does not add up. Each request is a greenlet of its own
    and leaves one line in `samples.jsonl` however it ends.
    """

    def __init__(self, http: HTTPClient, event: Any) -> None:  # noqa: ANN401
        """Send through *http*; *event* is Locust's request event."""
        self.http = http
        self.event = event
        self.job = JOB
        self.schedule = read_schedule(FOLDER / "schedule.jsonl")
        self.samples = (FOLDER / "samples.jsonl").open("w", encoding="utf-8", buffering=1)
        self.over = Event()
        self.stop = "complete"
        self.window_left = sum(request.in_window for request in self.schedule)
        self.num_sent = self.num_done = self.num_failed = self.refusals = 0
        self.refused_since_s = 0.0
        self.heartbeat_lag_s: list[float] = []
        self.origin_s = time.monotonic() + LEAD_IN_S

    def run(self) -> None:
        """Run to the end of the window's last request, or until there is no point going on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            gevent.signal_handler(number, self.end, "interrupted")
        watchers = [gevent.spawn(self.beat), gevent.spawn(self.tell)]
        started_unix_s = time.time() + LEAD_IN_S
        cpu_s = time.process_time()
        flights = Group()
        for request in self.schedule:
            body = self.job.body(request)  # while there is time: not between due and send
            if self.over.wait(max(0.0, request.due_s - self.now())):
                break
            flights.start(gevent.Greenlet(self.send, request, body))
        self.over.wait(self.job.timeout_s)
        flights.kill()
        gevent.killall(watchers)
        self.samples.close()
        if self.refusals and self.stop == "complete":
            self.stop = "died"  # the last that we heard of it is that it is not there
        wall_s = self.now() + LEAD_IN_S
        client = Client(
            stop=self.stop,
            started_unix_s=started_unix_s,
            origin_monotonic_s=self.origin_s,
            wall_s=wall_s,
            cpu_fraction=(time.process_time() - cpu_s) / wall_s,
            heartbeat_lag_s=tuple(sorted(self.heartbeat_lag_s)),
            machine=machine(),
            versions=versions(locust=locust.__version__),
        )
        write_client(client, FOLDER / "client.json")

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.origin_s

    def end(self, why: str) -> None:
        """End the run early."""
        if not self.over.is_set():
            self.stop = why
            self.over.set()

    def send(self, request: Request, body: bytes) -> None:
        """Send one request and follow its stream to the end."""
        send_s = self.now()
        self.num_sent += 1
        stream = CompletionStream()
        outcome, detail = "ok", None
        try:
            with gevent.Timeout(self.job.timeout_s):
                self.follow(request, body, stream)
        except StreamError as error:
            outcome, detail = error.outcome, str(error)
        except gevent.Timeout:
            outcome, detail = "timeout", f"no end after {self.job.timeout_s:g} s"
        except gevent.GreenletExit:
            outcome, detail = "unfinished", None
        except (OSError, HTTPParseError) as error:
            outcome, detail = _broken(error), f"{type(error).__name__}: {error}"
        self.record(
            Sample(
                index=request.index,
                in_window=request.in_window,
                due_s=request.due_s,
                send_s=send_s,
                end_s=self.now(),
                asked_input_tokens=request.input_tokens,
                asked_output_tokens=request.output_tokens,
                input_tokens=stream.input_tokens,
                output_tokens=stream.output_tokens,
                chunk_s=tuple(stream.chunk_s),
                chunk_tokens=tuple(stream.chunk_tokens),
                outcome=outcome,
                detail=detail,
            )
        )

    def follow(self, request: Request, body: bytes, stream: CompletionStream) -> None:
        """Read the answer line by line, stamping each event as its last byte arrives."""
        # Unique beyond this run: engines name requests by it, and KV caches by requests.
        name = f"{self.job.prompt_salt:x}-{request.index}"
        headers = {"content-type": "application/json", "x-request-id": name}
        response = self.http.request("POST", PATH, body=body, headers=headers)
        try:
            status = response.status_code
            if status != 200:  # noqa: PLR2004
                text = bytes(response.read(200)).decode(errors="replace")
                raise StreamError("shed" if status in SHED else "bad_status", f"{status}: {text}")
            parser = EventParser()
            while not stream.done and (line := response.readline(b"\n")):
                for data in parser.feed(line):
                    stream.take(data, self.now())
            stream.finish()
            # Read on to the end of the message, for then the connection can be used again.
            with gevent.Timeout(CLOSING_S, False):  # noqa: FBT003  (gevent's own signature)
                while response.readline(b"\n"):
                    pass
        finally:
            response.release()

    def record(self, sample: Sample) -> None:
        """Write the sample down, tell Locust's statistics, and see whether the run is over."""
        self.samples.write(to_line(sample) + "\n")
        self.num_done += 1
        self.num_failed += not sample.ok
        self.event.fire(
            request_type="POST",
            name=PATH,
            response_time=1000 * (sample.end_s - sample.due_s),
            response_length=sample.output_tokens or 0,
            exception=None if sample.ok else StreamError(sample.outcome, sample.detail or ""),
            context={},
        )
        self.watch_target(sample)
        self.window_left -= sample.in_window
        if not self.window_left:
            self.over.set()

    def watch_target(self, sample: Sample) -> None:
        """End the run once the target has refused every connection for a while."""
        if sample.outcome == "refused":
            self.refusals += 1
            if self.refusals == 1:
                self.refused_since_s = sample.end_s
            long = sample.end_s - self.refused_since_s >= DEAD_AFTER_S
            if self.refusals >= DEAD_AFTER_REFUSALS and long:
                self.end("died")
        elif sample.outcome != "unfinished":
            self.refusals = 0

    def beat(self) -> None:
        """Measure how late this process wakes, and stop once nobody waits for the result."""
        parent = os.getppid()
        while True:
            before_s = time.monotonic()
            gevent.sleep(HEARTBEAT_S)
            self.heartbeat_lag_s.append(time.monotonic() - before_s - HEARTBEAT_S)
            if os.getppid() != parent:
                self.end("orphaned")

    def tell(self) -> None:
        """Say on stdout, a JSON line each time, how far the run is."""
        while True:
            state = {"t_s": self.now(), "sent": self.num_sent, "done": self.num_done}
            sys.stdout.write(json.dumps(state | {"failed": self.num_failed}) + "\n")
            sys.stdout.flush()
            gevent.sleep(PROGRESS_S)


def _broken(error: Exception) -> str:
    """Name the outcome of a request whose connection broke, or never came about."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
        return "client"
    if isinstance(error, ConnectionResetError | BrokenPipeError | HTTPParseError):
        return "cut"
    return "refused"


def main() -> int:
    """Run the job without Locust's web interface; return the exit code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each stream is an open file
    with contextlib.suppress(OSError):
        # On one machine with the engines, whoever stamps late stamps wrong; not all users may.
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    environment = Environment(user_classes=[OpenLoop])
    runner = environment.create_local_runner()
    runner.start(1, spawn_rate=1)
    runner.greenlet.join()
    return environment.process_exit_code or 0


if __name__ == "__main__":
    sys.exit(main())
