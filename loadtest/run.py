"""One run as it lies in its folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.client import Client, read_client
from loadtest.job import Job, read_job, write_job
from loadtest.samples import Sample, read_samples
from loadtest.schedule import Request, read_schedule, write_schedule
from sizing.errors import InputError
from sizing.plan import Plan, read_plan

if TYPE_CHECKING:
    from pathlib import Path

PLAN = "plan.json"
RESULTS = ("samples.jsonl", "client.json", "verdict.json", "report.html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as it lies in its folder."""

    job: Job
    plan: Plan | None
    schedule: tuple[Request, ...]
    samples: tuple[Sample, ...]
    client: Client

    @property
    def measured(self) -> tuple[Sample, ...]:
        """The samples that count."""
        return tuple(s for s in self.samples if s.in_window)


def prepare(folder: Path, job: Job, schedule: tuple[Request, ...], plan: Path | None) -> None:
    """
    Write into *folder* what the client needs; results of an earlier run there are removed.

    Raises:
        InputError: the folder cannot be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            (folder / name).unlink(missing_ok=True)
        copy = folder / PLAN
        if plan and not (copy.exists() and copy.samefile(plan)):
            shutil.copyfile(plan, copy)
        write_job(job, folder / "run.json")
        write_schedule(schedule, folder / "schedule.jsonl")
    except OSError as error:
        raise InputError("--output", str(folder), f"a writable folder: {error.strerror}") from None


def read_run(folder: Path) -> Run:
    """
    Read the run in *folder*.

    Raises:
        InputError: a file is missing or not what this version writes.

    """
    job = read_job(folder / "run.json")
    try:
        schedule = read_schedule(folder / "schedule.jsonl")
    except (OSError, TypeError, ValueError) as error:
        raise InputError(
            str(folder / "schedule.jsonl"), str(error), "what `loadtest run` writes"
        ) from None
    return Run(
        job=job,
        plan=read_plan(folder / job.plan) if job.plan else None,
        schedule=schedule,
        samples=read_samples(folder / "samples.jsonl"),
        client=read_client(folder / "client.json"),
    )


def write_whole(path: Path, text: str) -> None:
    """Write *text* so that *path* never holds a part of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
