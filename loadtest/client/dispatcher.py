"""Send each request when it is due, whether or not earlier ones were answered (open loop)."""

from __future__ import annotations

# isort: off
import gevent  # first: what follows imports a patched standard library

# isort: on
import contextlib
import math
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gevent.event import Event
from gevent.pool import Group

from loadtest.client.endpoint import authorization
from loadtest.client.prompts import Ids, Prompts
from loadtest.client.request import SHORTEST_S, RequestTask, StampedSocket
from loadtest.client.stream import CompletionStream
from loadtest.run.client_health import STALL_S, Client, new_client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from geventhttpclient.client import HTTPClient

    from loadtest.run.job import Job
    from minicluster.workload.samples import Sample
    from minicluster.workload.schedule import ScheduledRequest

HEARTBEAT_S = 0.005
"""Interval of the timer whose lateness is measured: a quarter of a fast token interval."""

TIMER_GRAIN_S = 0.001  # resolution of the event loop's timers (libev)
MAX_POLLING_FRACTION = 0.1  # largest fraction of the run that may be spent polling for a due time
FIRST_CONNECTION_S = 1.0  # time limit of the connection that is opened before the run

DEAD_AFTER_REQUESTS = 5
"""Consecutive requests without any sign of the target, after which it counts as dead."""

DEAD_AFTER_S = {"refused": 3.0, "timeout": 30.0}
"""
Least silence before the target counts as dead, by the outcome of the last request. A closed port
is a sure sign, and 3 s bridge a burst that fills the backlog; a target that accepts connections
and sends nothing may be busy with one long step, so it has the shortest default time limit.
"""


class Dispatcher:
    """
    One process's share of a run; `stop` is why it ended (`Client.stop`).

    Due times are absolute, so lateness does not add up. Each request is a greenlet of its own
    and leaves one sample however it ends. A request that follows another (closed loop, next turn)
    is due when that one has ended, plus the thinking time. The run ends by itself with `died` once
    the target refuses connections, or lets requests time out while no open stream gets anything.
    """

    def __init__(
        self,
        job: Job,
        requests: Sequence[ScheduledRequest],
        http: HTTPClient,
        *,
        origin_s: float,
        record: Callable[[Sample], None],
    ) -> None:
        """Prepare to send *requests* from *origin_s* (monotonic) on and to *record* each sample."""
        self._job, self._http, self._origin_s, self._record = job, http, origin_s, record
        self._prompts = Prompts(job)
        key = authorization(os.environ, insecure=job.insecure)
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"} | key
        self._roots = [r for r in requests if r.previous is None]
        self._next = {r.previous: r for r in requests if r.previous is not None}
        self._unfinished = {r.index for r in requests if r.in_window}
        self._in_flight: dict[int, RequestTask] = {}
        self._greenlets = Group()
        self._over = Event()
        self._silent: list[Sample] = []
        self._last_chunk_s = -math.inf
        self._heartbeat_lags_s: list[float] = []
        self._connections = 0
        self._stamps, self._stalled_s = "", 0.0
        self._turn_s = self._polled_s = 0.0
        self._cpu_s: list[tuple[float, float]] = []
        self.sent = self.done = self.failed = 0
        self.stop = "complete"
        self.killed = False  # by Locust: the caller has to end as well

    @property
    def window_left(self) -> int:
        """Number of requests of the window that have not ended."""
        return len(self._unfinished)

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._origin_s

    def end(self, reason: str) -> None:
        """End the run; *reason* is a `Client.stop`."""
        if not self._over.is_set():
            self.stop = reason
            self._over.set()

    def run(self) -> Client:
        """Send until `end` is called; return the health of this process."""
        self._prepare_connections()
        heartbeat = gevent.spawn(self._measure_heartbeat)
        started_unix_s = time.time() - self.now()
        try:
            for request in self._roots:
                # Prompts are made while there is time, not between a due time and its send.
                if self.now() < request.due_s:
                    gevent.sleep(SHORTEST_S)
                ids = self._prompts.ids(request)
                body = self._prompts.body(request, ids)
                if self._over_before(request.due_s):
                    break
                self._start(request, request.due_s, ids, body)
            self._over.wait()
        except gevent.GreenletExit:  # Locust's own way to end a user
            self.killed = True
            self.end("interrupted")
        self._greenlets.kill()
        heartbeat.kill()
        if self.stop == "complete" and any(s.outcome == "refused" for s in self._silent):
            self.stop = "died"  # the last connection was refused, and none succeeded since
        return replace(
            new_client(self.stop, started_unix_s=started_unix_s, origin_monotonic_s=self._origin_s),
            wall_s=self.now(),
            cpu_fraction=self._cpu_fraction(),
            heartbeat_lag_s=tuple(sorted(self._heartbeat_lags_s)),
            stalled_s=self._stalled_s,
            connections=self._connections,
            stamps=self._stamps,
        )

    def _over_before(self, due_s: float) -> bool:
        """Wait until *due_s*; return whether the run ended before."""
        # The event loop's timers are 1 ms coarse, which at 75 requests/s would show in the gaps.
        # The last millisecond is spent polling, unless that would cost too much of the core.
        affordable = self._polled_s < MAX_POLLING_FRACTION * self.now()
        grain_s = TIMER_GRAIN_S if affordable else 0.0
        early_s = due_s - grain_s - self.now()
        if early_s > 0:
            self._over.wait(early_s)
        from_s = self.now()
        while self.now() < due_s and not self._over.is_set():
            gevent.idle()  # unlike sleep(0) it lets the loop look for what has arrived
        self._polled_s += self.now() - from_s
        # A late request is sent at once, for a turn of a busy event loop takes milliseconds; but
        # the streams get their turn, however many requests are late.
        if self.now() - max(due_s, self._turn_s) > TIMER_GRAIN_S:
            gevent.sleep(SHORTEST_S)
            self._turn_s = self.now()
        return bool(self._over.is_set())

    def _start(self, request: ScheduledRequest, due_s: float, ids: Ids, body: bytes) -> None:
        self.sent += 1
        task = RequestTask(
            request=request,
            due_s=due_s,
            path=self._prompts.path,
            body=body,
            # Unique beyond this run: engines name requests by it, and KV caches by requests.
            name=f"{self._job.prompt_salt:x}-{request.index}",
            http=self._http,
            timeout_s=self._job.timeout_s,
            origin_s=self._origin_s,
            stream=CompletionStream(request.output_tokens),
            headers=self._headers,
        )
        self._in_flight[request.index] = task
        self._greenlets.start(gevent.Greenlet(self._follow, task, ids))

    def _follow(self, task: RequestTask, ids: Ids) -> None:
        try:
            sample = task.send()
            self._count(task, sample)
            self._record(sample)
            self._check_target(sample)
            if (following := self._next.get(sample.index)) and not self._over.is_set():
                self._send_next(task, following, ids)
        except Exception:
            self._abandon(task.request)
            raise  # gevent prints it

    def _count(self, task: RequestTask, sample: Sample) -> None:
        del self._in_flight[sample.index]
        self._unfinished.discard(sample.index)
        self.done += 1
        self.failed += not sample.ok
        if sample.chunk_s:
            self._last_chunk_s = max(self._last_chunk_s, sample.chunk_s[-1])
        if sample.ok and self._stamps != "reader":
            self._stamps = "kernel" if task.stream.by_kernel else "reader"

    def _abandon(self, request: ScheduledRequest | None) -> None:
        """Wait neither for *request* nor for those that follow it: none of them is sent."""
        while request:
            self._unfinished.discard(request.index)
            request = self._next.get(request.index)

    def _send_next(self, task: RequestTask, following: ScheduledRequest, ids: Ids) -> None:
        conversation = None
        if following.session is not None:
            answer = [i for i in task.stream.token_ids if 0 <= i < self._job.vocab_size]
            conversation = self._prompts.conversation(task.request, ids, answer)
        due_s = self.now() + following.think_s
        ids = self._prompts.ids(following, conversation)
        body = self._prompts.body(following, ids)
        gevent.sleep(max(0.0, due_s - self.now()))
        if not self._over.is_set():
            self._start(following, due_s, ids, body)

    def _check_target(self, sample: Sample) -> None:
        """End the run once nothing answers at the target any more."""
        if sample.outcome == "unfinished":
            return
        if sample.outcome not in DEAD_AFTER_S or self._received_since(sample):
            self._silent.clear()
            return
        self._silent.append(sample)
        silence_s = sample.end_s - self._silent[0].send_s
        if len(self._silent) >= DEAD_AFTER_REQUESTS and silence_s >= DEAD_AFTER_S[sample.outcome]:
            self.end("died")

    def _received_since(self, sample: Sample) -> bool:
        """Whether any stream received a chunk while *sample* waited, which then timed out."""
        if sample.outcome != "timeout":
            return False
        streams = (task.stream.chunk_s for task in self._in_flight.values())
        latest_s = max((chunk_s[-1] for chunk_s in streams if chunk_s), default=-math.inf)
        return max(latest_s, self._last_chunk_s) > sample.send_s

    def _measure_heartbeat(self) -> None:
        while True:
            before_s = time.monotonic()
            gevent.sleep(HEARTBEAT_S)
            lag_s = time.monotonic() - before_s - HEARTBEAT_S
            self._heartbeat_lags_s.append(lag_s)
            if lag_s > STALL_S and self.now() >= self._job.window.start_s:
                self._stalled_s += lag_s
            if not self._cpu_s or self.now() - self._cpu_s[-1][0] >= 1:
                self._cpu_s.append((self.now(), time.process_time()))

    def _cpu_fraction(self) -> float:
        """Return the fraction of a core used from the window's start on, if the run came so far."""
        readings = [*self._cpu_s, (self.now(), time.process_time())]
        from_s = min(self._job.window.start_s, readings[-1][0] / 2)
        (t0, cpu0), (t1, cpu1) = next(r for r in readings if r[0] >= from_s), readings[-1]
        return (cpu1 - cpu0) / (t1 - t0) if t1 > t0 else 0.0

    def _prepare_connections(self) -> None:
        """
        Make the connection pool use kernel timestamps, and count the connections that it opens.

        The host name is resolved once, because the resolver is a thread, and one connection is
        opened, because the first one takes a process longest.
        """

        def count(_socket: object) -> None:
            self._connections += 1

        pool = self._http._connection_pool  # noqa: SLF001  (no public way in)
        pool.after_connect = count  # its own hook
        pool._create_tcp_socket = StampedSocket  # noqa: SLF001  (its own factory)
        with contextlib.suppress(OSError):
            addresses = pool._resolve()  # noqa: SLF001
            pool._resolve = lambda: addresses  # noqa: SLF001
            with gevent.Timeout(FIRST_CONNECTION_S, False):  # noqa: FBT003  (gevent's own)
                pool.return_socket(pool.get_socket())
