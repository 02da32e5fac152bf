"""Start the load client as a process of its own, show its progress, and make sure that it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from loadtest.client.endpoint import ANSWER_S, ask
from loadtest.run.client_health import read_client
from minicluster import shell
from minicluster.errors import Exit, InputError, MiniclusterError
from minicluster.workload.engine_steps import ENGINE_STEPS, PATH, write_engine_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loadtest.run.job import Job

TERMINATE_WAIT_S = 30.0
"""Time between SIGTERM and SIGKILL: a client with thousands of streams needs seconds to close."""


def launch_client(
    folder: Path, report: Callable[[dict[str, float]], None], *, lock: int | None = None
) -> None:
    """
    Run the job in *folder* to its end; the client leaves its files in the same folder.

    Twice a second *report* gets the seconds since the start (`t_s`) and the numbers of requests
    `sent`, `done` and `failed`. The client has a session of its own, so that Ctrl-C reaches it
    once, through this process. It ends by itself if this process disappears, or if the endpoint
    does, and keeps the *lock* of the folder until then.

    Raises:
        KeyboardInterrupt: passed on after the client has ended and kept its partial results.
        InputError: the client could not write into *folder* any more.
        MiniclusterError: the client crashed.
        ModuleNotFoundError: Locust, which the extra `loadtest` brings, is not installed.
    """
    if find_spec("locust") is None:
        raise ModuleNotFoundError(name="locust")
    client = subprocess.Popen(
        [sys.executable, "-m", "loadtest.client.locustfile"],
        env=os.environ | {"LOADTEST_DIR": str(folder), "LOADTEST_PARENT": str(os.getpid())},
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        pass_fds=() if lock is None else (lock,),
    )
    with client:
        try:
            for line in client.stdout or ():
                report(json.loads(line))
            code = client.wait()
        except BaseException:
            client.terminate()
            try:
                client.communicate(timeout=TERMINATE_WAIT_S)
            except subprocess.TimeoutExpired:
                client.kill()
            raise
    if code == Exit.BAD_INPUT:
        expectation = "a folder that has room and stays writable during the run; see above"
        way_out = f"`loadtest report {folder}` judges the samples that were written"
        raise InputError("--output", str(folder), expectation, way_out)
    if code:
        kept = f"`loadtest report {folder}` judges the samples so far, if there are any"
        raise MiniclusterError(f"the load client ended with exit code {code}; see above; {kept}")


def run_with_progress_bar(folder: Path, job: Job, lock: int) -> None:
    """Run the job as `launch_client`, with a progress bar on stderr if it is a terminal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell that starts a background job ignores SIGINT for it; `kill` is to act as Ctrl-C.
        signal.signal(number, signal.default_int_handler)
    bar = ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=shell.talk,
        disable=not shell.talk.is_terminal,
    )
    job = job.by_the_clock()
    with bar:
        task = bar.add_task("load", total=job.window.end_s)

        def show(progress: dict[str, float]) -> None:
            phase = "warm-up" if progress["t_s"] < job.window.start_s else "measuring"
            failed = f", {progress['failed']} failed" if progress["failed"] else ""
            text = f"{phase}: {progress['sent']} sent, {progress['done']} done{failed}"
            bar.update(task, completed=progress["t_s"], description=text)

        try:
            launch_client(folder, show, lock=lock)
        except KeyboardInterrupt:
            if not (folder / "client.json").exists():
                raise


def keep_engine_steps(folder: Path, job: Job) -> None:
    """
    Write the steps that the engines ran during a run beside its samples.

    Nothing is written of simulated engines whose steps are the plan's own, nor where the endpoint
    is not `serving`'s: the run is then judged without the pace of the engines.
    """
    start_unix_s = read_client(folder / "client.json").started_unix_s
    interval = f"begin={start_unix_s}&end={time.time()}"
    expected = "the steps of the engines"
    try:
        url = f"{job.host}{PATH}?{interval}"
        with ask(url, expected, wait_s=ANSWER_S, insecure=job.insecure) as answer:
            steps = json.load(answer)["steps"]
    except (MiniclusterError, OSError, http.client.HTTPException, KeyError, TypeError, ValueError):
        return
    if job.slowdown is None or any(steps.values()):
        write_engine_steps(folder / ENGINE_STEPS, steps, start_unix_s)
