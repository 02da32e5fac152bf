"""Send each request when it is due, whatever has become of the others."""

from __future__ import annotations

# isort: off
import gevent  # first: what follows imports a patched standard library

# isort: on
import contextlib
import os
import time
from importlib import metadata
from typing import TYPE_CHECKING

from gevent.event import Event
from gevent.pool import Group

from loadtest.client.api_key import authorization
from loadtest.client.prompts import Prompts
from loadtest.client.request import SHORTEST_S, RequestTask, StampedSocket
from loadtest.client.stream import CompletionStream
from loadtest.run.client_health import STILL_S, Client
from loadtest.run.machine import machine, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from geventhttpclient.client import HTTPClient

    from loadtest.client.prompts import Ids
    from loadtest.run.job import Job
    from minicluster.workload.samples import Sample
    from minicluster.workload.schedule import ScheduledRequest

HEARTBEAT_S = 0.005
TIMER_GRAIN_S = 0.001
MAX_POLLED = 0.1
"""Share of the time that may be spent polling."""
FIRST_CONNECTION_S = 1.0
DEAD_AFTER_REFUSALS = 5
DEAD_AFTER_S = 3.0


class Dispatcher:
    """
    One process's share of a run.

    Due times are absolute, so lateness does not add up. Each request is a greenlet of its own
    and leaves one sample however it ends. One that waits for another is due when that has ended.

    Attributes:
        stop: why it ended; see `Client.stop`.
        killed: whether it was its greenlet that was ended; the caller has to end, too.
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
        """Send *requests* through *http* from *origin_s* (monotonic) on; *record* each sample."""
        self._job, self._http, self._origin_s, self._record = job, http, origin_s, record
        self._prompts = Prompts(job)
        key = authorization(os.environ, insecure=job.insecure)
        self._headers = {"content-type": "application/json"} | key
        self._roots = [r for r in requests if r.previous is None]
        self._next = {r.previous: r for r in requests if r.previous is not None}
        self._awaited = {r.index for r in requests if r.in_window}
        self._said: dict[int, Ids] = {}
        self._tasks = Group()
        self._over = Event()
        self._refusals, self._refused_since_s = 0, 0.0
        self._beats: list[float] = []
        self._connections = 0
        self._stamps, self._still_s = "", 0.0
        self._turn_s = self._polled_s = 0.0
        self._cpu_s: list[tuple[float, float]] = []
        self.sent = self.done = self.failed = 0
        self.stop = "complete"
        self.killed = False

    @property
    def window_left(self) -> int:
        """Requests that count and have not ended."""
        return len(self._awaited)

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._origin_s

    def end(self, why: str) -> None:
        """End the run; `complete` if nothing is wrong."""
        if not self._over.is_set():
            self.stop = why
            self._over.set()

    def run(self) -> Client:
        """Send until told to end; return what this process says of itself."""
        self._watch_connections()
        watchers = [gevent.spawn(self._beat)]
        began_unix_s = time.time() - self.now()
        try:
            for request in self._roots:
                # Prompts are made while there is time, not between due and send of the last one.
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
        self._tasks.kill()
        gevent.killall(watchers)
        if self._refusals and self.stop == "complete":
            self.stop = "died"  # the last that we heard of it is that it is not there
        return Client(
            stop=self.stop,
            started_unix_s=began_unix_s,
            origin_monotonic_s=self._origin_s,
            wall_s=self.now(),
            cpu_fraction=self._cpu_fraction(),
            heartbeat_lag_s=tuple(sorted(self._beats)),
            still_s=self._still_s,
            connections=self._connections,
            stamps=self._stamps,
            machine=machine(),
            versions=versions(locust=metadata.version("locust")),
        )

    def _over_before(self, due_s: float) -> bool:
        """Wait until *due_s*; return whether the run ended before."""
        # The event loop's timers are 1 ms coarse, which at 75 requests/s would show in the gaps.
        # The last one is spent polling, unless they are so many that it would cost too much.
        grain_s = TIMER_GRAIN_S if self._polled_s < MAX_POLLED * self.now() else 0.0
        early_s = due_s - grain_s - self.now()
        if early_s > 0:
            self._over.wait(early_s)
        from_s = self.now()
        while self.now() < due_s and not self._over.is_set():
            gevent.idle()  # unlike sleep(0) it lets the loop look for what has arrived
        self._polled_s += self.now() - from_s
        # Whoever is late is sent at once, for a turn of a busy event loop takes milliseconds; but
        # the streams have their turn, however much is late.
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
        self._tasks.start(gevent.Greenlet(self._follow, task, ids))

    def _follow(self, task: RequestTask, ids: Ids) -> None:
        try:
            sample = task.send()
            self.done += 1
            self.failed += not sample.ok
            if sample.ok and self._stamps != "reader":
                self._stamps = "kernel" if task.stream.by_kernel else "reader"
            self._awaited.discard(sample.index)
            self._record(sample)
            self._watch_target(sample)
            if (waiting := self._next.get(sample.index)) and not self._over.is_set():
                self._go_on(task, waiting, ids)
        except Exception:
            self._give_up(task.request)
            raise  # gevent prints it

    def _give_up(self, request: ScheduledRequest | None) -> None:
        """Expect no end of *request*, nor of what waits for it: neither is sent any more."""
        while request:
            self._awaited.discard(request.index)
            request = self._next.get(request.index)

    def _go_on(self, task: RequestTask, waiting: ScheduledRequest, ids: Ids) -> None:
        """Send what waited for *task*, after its thinking time."""
        said = None
        if waiting.session is not None:
            said = self._prompts.conversation(task.request, ids, self._answer(task))
        due_s = self.now() + waiting.think_s
        ids = self._prompts.ids(waiting, said)
        body = self._prompts.body(waiting, ids)
        gevent.sleep(max(0.0, due_s - self.now()))
        if not self._over.is_set():
            self._start(waiting, due_s, ids, body)

    def _answer(self, task: RequestTask) -> list[int]:
        """Return the ids of the answer to *task*, as far as prompts can hold them."""
        size = self._job.vocab_size
        return [i for i in task.stream.token_ids if 0 <= i < size]

    def _watch_target(self, sample: Sample) -> None:
        """End the run once the target has refused every connection for a while."""
        if sample.outcome == "refused":
            self._refusals += 1
            if self._refusals == 1:
                self._refused_since_s = sample.end_s
            long = sample.end_s - self._refused_since_s >= DEAD_AFTER_S
            if self._refusals >= DEAD_AFTER_REFUSALS and long:
                self.end("died")
        elif sample.outcome != "unfinished":
            self._refusals = 0

    def _beat(self) -> None:
        """Measure how late this process wakes, and what it uses of its core."""
        while True:
            before_s = time.monotonic()
            gevent.sleep(HEARTBEAT_S)
            lag_s = time.monotonic() - before_s - HEARTBEAT_S
            self._beats.append(lag_s)
            if lag_s > STILL_S and self.now() >= self._job.window.start_s:
                self._still_s += lag_s
            if not self._cpu_s or self.now() - self._cpu_s[-1][0] >= 1:
                self._cpu_s.append((self.now(), time.process_time()))

    def _cpu_fraction(self) -> float:
        """Return the share of a core, from the window's start on where it came so far."""
        seen = [*self._cpu_s, (self.now(), time.process_time())]
        from_s = min(self._job.window.start_s, seen[-1][0] / 2)
        (t0, cpu0), (t1, cpu1) = next(s for s in seen if s[0] >= from_s), seen[-1]
        return (cpu1 - cpu0) / (t1 - t0) if t1 > t0 else 0.0

    def _watch_connections(self) -> None:
        """
        Have the kernel stamp what arrives, and count what the pool opens.

        The name is resolved once, for the resolver is a thread, and a connection opened, for the
        first takes a process longest.
        """

        def count(_socket: object) -> None:
            self._connections += 1

        pool = self._http._connection_pool  # noqa: SLF001  (no public way in)
        pool.after_connect = count  # its own hook
        pool._create_tcp_socket = StampedSocket  # noqa: SLF001  (its own factory)
        with contextlib.suppress(OSError):
            found = pool._resolve()  # noqa: SLF001
            pool._resolve = lambda: found  # noqa: SLF001
            with gevent.Timeout(FIRST_CONNECTION_S, False):  # noqa: FBT003  (gevent's own)
                pool.return_socket(pool.get_socket())
