"""The folder of a run: what the client needs, what it leaves, and what is judged."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.run.client_health import Client, read_client
from loadtest.run.job import Job, read_job
from minicluster.errors import InputError
from minicluster.files import locked, make_folder
from minicluster.plan import Plan, read_plan
from minicluster.units import scaled
from minicluster.workload.engine_steps import ENGINE_STEPS
from minicluster.workload.samples import Sample, read_samples
from minicluster.workload.schedule import ScheduledRequest, read_schedule, write_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from loadtest.run.schedule import Window
    from minicluster.specs.slo import SloSpec

PLAN = "plan.json"
RESULTS = (
    "samples.jsonl",
    "client.json",
    ENGINE_STEPS,
    "verdict.json",
    "llm-d.json",
    "report.html",
)


class Promise(NamedTuple):
    """A class of requests (empty: all), its limits, and its requests' indices in the schedule."""

    name: str
    slo: SloSpec
    requests: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its folder contains it."""

    job: Job
    plan: Plan | None
    schedule: tuple[ScheduledRequest, ...]
    samples: tuple[Sample, ...]
    client: Client

    @property
    def promises(self) -> tuple[Promise, ...]:
        """The limits of each class of requests; without classes of all."""
        job = self.job
        return tuple(
            Promise(name, slo, frozenset(r.index for r in self.schedule if r.class_of == at))
            for at, (name, slo) in enumerate(job.workload.promises(job.slo).items())
        )

    @property
    def cut_short(self) -> bool:
        """Whether it ended before its time: requests that were never sent are no misses then."""
        return self.client.stop != "complete"

    @property
    def measured(self) -> tuple[Sample, ...]:
        """The samples of the window."""
        return tuple(s for s in self.samples if s.in_window)


def as_json(record: Any) -> str:  # noqa: ANN401  (any dataclass)
    """Write *record*, a dataclass, as a JSON document."""
    return json.dumps(asdict(record), indent=2, allow_nan=False) + "\n"


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """
    Make *folder*, and keep every other run out of it until the end; yield the lock's open file.

    Raises InputError: another run is under way there, or the folder cannot be written.
    """
    make_folder(folder, "--output")
    with locked(folder / "run.lock", "--output", f"loadtest in {folder}") as lock:
        yield lock


def prepare(
    folder: Path, job: Job, schedule: tuple[ScheduledRequest, ...], plan: Path | None
) -> None:
    """
    Write the files that the client needs; results of an earlier run in *folder* are removed.

    Raises InputError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            (folder / name).unlink(missing_ok=True)
        copy = folder / PLAN
        if plan and not (copy.exists() and copy.samefile(plan)):
            shutil.copyfile(plan, copy)
        (folder / "run.json").write_text(as_json(job), encoding="utf-8")
        write_schedule(schedule, folder / "schedule.jsonl")
    except OSError as error:
        raise InputError("--output", str(folder), f"a writable folder: {error.strerror}") from None


def read_run(folder: Path) -> Run:
    """
    Read the run in *folder*; of simulated engines, times become seconds of the plan.

    Raises InputError: a file is missing, or is not what this version writes.
    """
    job = read_job(folder / "run.json")
    samples = read_samples(folder / "samples.jsonl")
    client = read_client(folder / "client.json")
    if job.slowdown is not None:
        samples = tuple(scaled(sample, 1 / job.slowdown) for sample in samples)
        client = client.in_seconds_of(job.slowdown)
    if job.shape.closed:
        job = replace(job, window=_realised(job, samples))
    elif client.stop != "complete":
        job = replace(job, window=_until(job, samples))
    return Run(
        job=job,
        plan=read_plan(folder / job.plan) if job.plan else None,
        schedule=read_schedule(folder / "schedule.jsonl"),
        samples=samples,
        client=client,
    )


def _until(job: Job, samples: tuple[Sample, ...]) -> Window:
    """Return the part of the window that a run came to, if it did: up to what it saw last."""
    last_s = max((s.end_s for s in samples), default=0.0)
    if last_s <= job.window.start_s:
        return job.window
    return replace(job.window, end_s=min(job.window.end_s, last_s))


def _realised(job: Job, samples: tuple[Sample, ...]) -> Window:
    due = sorted(s.due_s for s in samples if s.in_window)
    if len(due) < 2 or due[0] == due[-1]:  # noqa: PLR2004  (no gap between fewer)
        return job.window
    gap_s = (due[-1] - due[0]) / (len(due) - 1)
    return replace(job.window, start_s=due[0], end_s=due[-1] + gap_s)
