"""The client as people watch it: a progress bar, and Ctrl-C."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.client.launch import drive
from minicluster import shell

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.client.launch import Progress as Seen
    from loadtest.run.job import Job


def watch(folder: Path, job: Job) -> None:
    """Run the client with a progress bar; an interrupted one has left what it had."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # `kill` ends us as Ctrl-C does, and both do where a shell started us in the background.
        signal.signal(number, signal.default_int_handler)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=shell.talk,
        disable=not shell.talk.is_terminal,
    )
    with bar:
        task = bar.add_task("load", total=job.window.end_s)

        def show(seen: Seen) -> None:
            phase = "warm-up" if seen.t_s < job.window.start_s else "measuring"
            failed = f", {seen.failed} failed" if seen.failed else ""
            bar.update(
                task,
                completed=seen.t_s,
                description=f"{phase}: {seen.sent} sent, {seen.done} done{failed}",
            )

        try:
            drive(folder, show)
        except KeyboardInterrupt:
            if not (folder / "client.json").exists():
                raise
