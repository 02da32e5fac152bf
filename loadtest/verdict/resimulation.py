"""The prediction for exactly the requests that a run sent, by `sizing simulate`."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minicluster.command import find_command
from minicluster.errors import Exit, MiniclusterError
from minicluster.phases import TTFT_PHASES
from minicluster.workload.schedule import ScheduledRequest, write_schedule

if TYPE_CHECKING:
    from minicluster.workload.samples import Sample

TIME_LIMIT_S = 600.0  # time limit of one simulation; the longest in the tests takes ten seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRequest:
    """One request as simulated; phases are `minicluster.phases.TTFT_PHASES`."""

    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    longest_stall_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resimulation:
    """
    A run's own requests as simulated, by index in the schedule.

    Attributes:
        itl: mean and percentiles of the gaps between tokens, in seconds.
        busy_fraction: mean share of the run in which a replica computed, by role.
        pace: measured / planned seconds of the engine's steps at which it was simulated, by role.
        at_pace: the same at the pace of the engines; `None`: they did not report their steps.
    """

    requests: Mapping[int, PredictedRequest]
    itl: dict[str, float]
    busy_fraction: dict[str, float]
    pace: dict[str, float] = field(default_factory=dict)
    at_pace: Resimulation | None = None


def resimulate(
    plan: Path,
    samples: Sequence[Sample],
    schedule: Sequence[ScheduledRequest],
    engine_steps: Path | None = None,
    *,
    plain: bool = False,
) -> Resimulation:
    """
    Simulate the requests of *samples*, with their arrival times and lengths, on *plan*.

    The random arrivals are then the same on both sides, so that measured minus predicted varies
    far less than the measurement alone. The run's *schedule* says what prompts share. Requests
    that were turned away are left out: the simulator has no admission control. With the steps that
    the engines ran meanwhile (*engine_steps*) they are simulated once more, at that pace. Prompts
    and answers of a *plain* run are simulated with the lengths that they had.

    Raises MiniclusterError: the simulator is not installed or refuses; the message is its own.
    """
    command = find_command("sizing")
    reached = [s for s in samples if not s.turned_away]
    sent = sorted(reached, key=lambda s: (s.due_s, s.index))
    if not sent:
        raise MiniclusterError("no request reached an engine")
    scheduled = {request.index: request for request in schedule}
    with TemporaryDirectory(prefix="resimulation-") as folder:
        file, rows = Path(folder) / "schedule.jsonl", Path(folder) / "requests.csv"
        # The simulation has the times at which requests that follow others were really due.
        write_schedule(
            [_as_sent(scheduled[s.index], s, plain=plain) for s in sent],
            file,
        )
        simulation = ["simulate", str(plan), "--schedule", str(file), "--json", "-o", str(rows)]
        indices = [s.index for s in sent]
        planned = _read(rows, _simulated([command, *simulation]), indices)
        if engine_steps is None:
            return planned
        simulation += ["--engine-steps", str(engine_steps)]
        return replace(planned, at_pace=_read(rows, _simulated([command, *simulation]), indices))


def _as_sent(request: ScheduledRequest, sample: Sample, *, plain: bool) -> ScheduledRequest:
    """Return *request* when it was really due, and of a plain run as long as it really was."""
    request = replace(request, due_s=sample.due_s, previous=None, think_s=0.0)
    if not (plain and sample.ok):
        return request
    return replace(
        request,
        input_tokens=sample.input_tokens or request.input_tokens,
        output_tokens=sample.output_tokens or request.output_tokens,
    )


def _simulated(command: Sequence[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(  # noqa: S603  (our own command)
            command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise MiniclusterError(f"the simulator took longer than {TIME_LIMIT_S:.0f} s") from None
    if done.returncode not in {Exit.DONE, Exit.NEGATIVE}:  # a missed SLO is an answer, too
        lines = done.stderr.strip().splitlines()
        raise MiniclusterError(
            lines[-1] if lines else f"the simulator ended with exit code {done.returncode}"
        )
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def _read(rows: Path, summary: dict[str, Any], indices: Sequence[int]) -> Resimulation:
    with rows.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    requests = {
        index: PredictedRequest(
            ttft_s=float(row["ttft_s"]),
            tpot_s=float(row["tpot_s"]) if row["tpot_s"] else None,
            e2e_s=float(row["e2e_s"]),
            longest_stall_s=float(row["longest_stall_s"]),
            phases_s={name: float(row[f"{name}_s"]) for name in TTFT_PHASES},
        )
        for index, row in zip(indices, table, strict=True)
    }
    itl = summary["latencies"].get("itl", {})
    return Resimulation(
        requests=requests,
        itl={name: float(each["value_s"]) for name, each in itl.items()},
        busy_fraction=summary["busy_fraction"],
        pace={role: float(pace["factor"]) for role, pace in summary.get("pace", {}).items()},
    )
