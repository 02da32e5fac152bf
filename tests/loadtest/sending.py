"""The client without Locust's process around it: the same dispatcher, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gevent
from geventhttpclient.client import HTTPClient

from loadtest.client.dispatcher import Dispatcher
from loadtest.client.request import connections
from loadtest.run.client_health import Client
from loadtest.run.folder import Run, prepare, read_run
from loadtest.run.job import ChatForm, Job
from loadtest.run.run_config import RunLength, free_load, make_job
from loadtest.run.schedule import ArrivalShape
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.samples import Sample
from minicluster.workload.schedule import ScheduledRequest
from tests.loadtest.made import leave

WORKLOAD = WorkloadSpec(
    requests_per_s=60.0,
    input_tokens=Lengths(distribution="uniform", low=16, high=64),
    output_tokens=Lengths.fixed(10),
)
SOME = RunLength(num_requests=60, warmup_s=0.3)


def order(  # noqa: PLR0913  (each test names what it is about)
    host: str,
    extent: RunLength = SOME,
    *,
    shape: ArrivalShape | None = None,
    workload: WorkloadSpec = WORKLOAD,
    vocab_size: int = 500,
    workers: int = 1,
    chat: ChatForm | None = None,
) -> Job:
    load = free_load(workload, SloSpec(), model="fake", vocab_size=vocab_size)
    return replace(make_job(load, extent, host=host, shape=shape, workers=workers), chat=chat)


def dispatch(
    job: Job,
    requests: Sequence[ScheduledRequest],
    http: HTTPClient,
    beside: Callable[[Dispatcher], None] | None = None,
) -> tuple[Client, list[Sample]]:
    """Send *requests* until none that counts is left; *beside* is a greenlet of the process."""
    samples: list[Sample] = []
    dispatcher = Dispatcher(job, requests, http, origin_s=time.monotonic(), record=samples.append)

    def end() -> None:
        while dispatcher.window_left:
            gevent.sleep(0.01)
        dispatcher.end("complete")

    others = [gevent.spawn(end), *([gevent.spawn(beside, dispatcher)] if beside else [])]
    client = dispatcher.run()
    gevent.killall(others)
    return client, samples


def send(
    job: Job,
    folder: Path,
    beside: Callable[[Dispatcher], None] | None = None,
    requests: tuple[ScheduledRequest, ...] | None = None,
) -> Run:
    """
    Run *job* until none that counts is left, and read what it left.

    Args:
        job: whose window says when the warm-up ends.
        folder: of the run.
        beside: another greenlet of the process.
        requests: to send; if not said, those that the job draws.
    """
    requests = requests or job.requests()
    prepare(folder, job, requests, None)
    pool = connections(job)
    client, samples = dispatch(job, requests, pool.get_client(job.host), beside)
    pool.close()
    leave(folder, samples, client)
    return read_run(folder)
