"""The engines' own steps during a run, asked of the endpoint when the load has ended."""

from __future__ import annotations

import http.client
import json
import time
from typing import TYPE_CHECKING

from loadtest.client.endpoint import ANSWER_S, ask
from loadtest.run.client_health import read_client
from minicluster.errors import MiniclusterError
from minicluster.workload.engine_steps import ENGINE_STEPS, PATH, write_engine_steps

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.run.job import Job


def keep_engine_steps(folder: Path, job: Job) -> None:
    """
    Write the steps that the engines ran during a run beside its samples.

    Nothing is written of simulated engines, whose steps are the plan's own, nor where the endpoint
    is not `serving`'s: the run is then judged without the pace of the engines.
    """
    if job.slowdown is not None:
        return
    start_unix_s = read_client(folder / "client.json").started_unix_s
    interval = f"begin={start_unix_s}&end={time.time()}"
    expected = "the steps of the engines"
    try:
        url = f"{job.host}{PATH}?{interval}"
        with ask(url, expected, wait_s=ANSWER_S, insecure=job.insecure) as answer:
            steps = json.load(answer)["steps"]
    except (MiniclusterError, OSError, http.client.HTTPException, KeyError, TypeError, ValueError):
        return
    write_engine_steps(folder / ENGINE_STEPS, steps, start_unix_s)
