"""One run by one process or by several: who starts when, who sends what, and what they found."""

from __future__ import annotations

# isort: off
import gevent  # first: what follows imports a patched standard library

# isort: on
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gevent.event import AsyncResult, Event

from loadtest.client.dispatcher import Dispatcher
from loadtest.client.stream import StreamError
from loadtest.run.client_health import SHORT, Client, merged, write_client
from loadtest.run.schedule import share
from minicluster.workload.samples import to_line
from minicluster.workload.schedule import read_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from geventhttpclient.client import HTTPClient
    from locust.runners import Runner

    from loadtest.run.job import Job
    from minicluster.workload.samples import Sample

LEAD_IN_S = 0.3
"""From the cue to the start of the run: time for the cue to reach every worker."""
NEWS_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSignal:
    """Start at *unix_s* with part *part* of *parts*; *salt* makes this run's prompts its own."""

    unix_s: float
    part: int
    parts: int
    salt: int


class WorkerProcess:
    """
    In each process that sends: waits for its cue, plays its part, tells the conductor.

    Messages go through Locust's runner, which delivers them in this process or over its network.
    """

    def __init__(self, runner: Runner, job: Job, folder: Path) -> None:
        """Listen for the conductor."""
        self._runner, self._job, self._folder = runner, job, folder
        self._cue: AsyncResult[StartSignal] = AsyncResult()
        self._dispatcher: Dispatcher | None = None
        self._lines: list[str] = []
        self.playing = False
        runner.register_message("cue", self._on_cue)
        runner.register_message("over", self._on_over)

    def play(self, http: HTTPClient, request_event: Any) -> None:  # noqa: ANN401  (Locust's own)
        """Play this process's part of one run through *http*."""
        self.playing = True
        try:
            self._play(http, request_event)
        finally:
            self._cue, self._dispatcher, self.playing = AsyncResult(), None, False

    def _play(self, http: HTTPClient, request_event: Any) -> None:  # noqa: ANN401
        # In a thread: who reads for long must not be silent, or is given up.
        reading = gevent.get_hub().threadpool.spawn(read_schedule, self._folder / "schedule.jsonl")
        schedule = reading.get()
        cue = self._cue.get()

        def record(sample: Sample) -> None:
            self._lines.append(to_line(sample))
            if not dispatcher.window_left:
                self._tell(dispatcher)
            request_event.fire(
                request_type="POST",
                name="/v1/completions",
                response_time=1000 * (sample.end_s - sample.due_s),
                response_length=sample.output_tokens or 0,
                exception=None if sample.ok else StreamError(sample.outcome, sample.detail or ""),
                context={},
            )

        self._dispatcher = dispatcher = Dispatcher(
            replace(self._job, prompt_salt=cue.salt),
            share(schedule, cue.part, cue.parts),
            http,
            origin_s=time.monotonic() + cue.unix_s - time.time(),
            record=record,
        )
        teller = gevent.spawn(self._keep_telling, dispatcher)
        client = dispatcher.run()
        teller.kill()
        self._tell(dispatcher)
        self._runner.send_message("client", asdict(client))
        if dispatcher.killed:
            raise gevent.GreenletExit

    def end(self, why: str) -> None:
        """End this process's part."""
        if self._dispatcher:
            self._dispatcher.end(why)

    def _on_cue(self, msg: Any, **_: object) -> None:  # noqa: ANN401  (Locust's own)
        self._cue.set(StartSignal(**msg.data))

    def _on_over(self, msg: Any, **_: object) -> None:  # noqa: ANN401
        self.end(msg.data["why"])

    def _keep_telling(self, dispatcher: Dispatcher) -> None:
        while True:
            self._tell(dispatcher)
            gevent.sleep(NEWS_S)

    def _tell(self, dispatcher: Dispatcher) -> None:
        """Send what is new; a process without a request that counts has nothing left at once."""
        lines, self._lines = self._lines, []
        news = {
            "lines": lines,
            "t_s": dispatcher.now(),
            "sent": dispatcher.sent,
            "done": dispatcher.done,
            "failed": dispatcher.failed,
            "left": dispatcher.window_left,
        }
        self._runner.send_message("news", news)


class Coordinator:
    """
    In one process: gives the cue, gathers samples and clients, ends the run.

    Attributes:
        finished: set when everything is written.
    """

    def __init__(self, runner: Runner, job: Job, folder: Path) -> None:
        """Listen for the players."""
        self._runner, self._job, self._folder = runner, job, folder
        self.finished = Event()
        self._players: tuple[str, ...] = ()
        self._news: dict[str, dict[str, float]] = {}
        self._clients: dict[str, Client] = {}
        self._over = self._running = self._cancelled = False
        self._short = False
        self.tell: Callable[[dict[str, float]], None] = lambda _: None
        runner.register_message("news", self._on_news)
        runner.register_message("client", self._on_client)

    def start(self, players: tuple[str, ...]) -> None:
        """Give *players*, client ids of Locust, their cues; once for each run."""
        if self._running or self._cancelled:
            return  # Locust says again that all are there, after one more or less came
        self._running, self._short = True, False
        self._players, self._news, self._clients, self._over = players, {}, {}, False
        self._samples = (self._folder / "samples.jsonl").open("w", encoding="utf-8")
        cue = StartSignal(
            unix_s=time.time() + LEAD_IN_S,
            part=0,
            parts=len(players),
            salt=self._job.prompt_salt ^ time.time_ns(),
        )
        for part, player in enumerate(players):
            self._runner.send_message("cue", asdict(replace(cue, part=part)), client_id=player)

    def end(self, why: str) -> None:
        """End the run everywhere; one that has not begun never does."""
        if not self._running:
            self._cancelled = True
            self.finished.set()
        elif not self._over:
            self._over = True
            self._runner.send_message("over", {"why": why})

    def reckon_with(self, there: Sequence[str]) -> None:
        """End the run if a player is not *there* any more: it proves nothing, samples are kept."""
        left = tuple(p for p in self._players if p in there or p in self._clients)
        if self._running and left != self._players:
            self._players, self._short = left, True
            self.end(SHORT)
            self._finish_if_all_told()

    def _on_news(self, msg: Any, **_: object) -> None:  # noqa: ANN401  (Locust's own)
        if msg.node_id not in self._players:
            return  # it was given up, and came back
        news = dict(msg.data)
        lines = news.pop("lines")
        self._samples.write("".join(f"{line}\n" for line in lines))
        self._samples.flush()
        self._news[msg.node_id] = news
        seen = self._news.values()
        total = {key: sum(n[key] for n in seen) for key in ("sent", "done", "failed")}
        self.tell({"t_s": max(n["t_s"] for n in seen)} | total)
        if len(self._news) == len(self._players) and not any(n["left"] for n in seen):
            self.end("complete")

    def _on_client(self, msg: Any, **_: object) -> None:  # noqa: ANN401
        if msg.node_id not in self._players:
            return
        client = Client(**msg.data | {"heartbeat_lag_s": tuple(msg.data["heartbeat_lag_s"])})
        self._clients[msg.node_id] = client
        if client.stop != "complete":
            self.end(client.stop)
        self._finish_if_all_told()

    def _finish_if_all_told(self) -> None:
        if self.finished.is_set() or any(p not in self._clients for p in self._players):
            return
        self._running = False
        self._samples.close()
        if self._clients:
            all_in_all = merged(tuple(self._clients.values()))
            if self._short and all_in_all.stop == "complete":
                all_in_all = replace(all_in_all, stop=SHORT)  # the last word of one is missing
            write_client(all_in_all, self._folder / "client.json")
        self.finished.set()
