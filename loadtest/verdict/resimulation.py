"""The prediction made again, for exactly the requests that a run sent: `sizing simulate`."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minicluster.command import find_command
from minicluster.errors import MiniclusterError
from minicluster.workload.request_outcome import turned_away
from minicluster.workload.schedule import ScheduledRequest, write_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.workload.samples import Sample

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRequest:
    """
    One request as the simulator has it.

    Attributes:
        longest_stall_s: its longest gap between two tokens.
        phases_s: its TTFT by phase, in the order of the system.
    """

    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    longest_stall_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resimulation:
    """
    A run's own requests in the simulator.

    Attributes:
        requests: by index of the schedule.
        itl: mean and percentiles of the gaps, seconds.
    """

    requests: Mapping[int, PredictedRequest]
    itl: dict[str, float]


def replay(
    plan: Path,
    samples: Sequence[Sample],
    *,
    pace: float = 1.0,
    schedule: Sequence[ScheduledRequest] = (),
) -> Resimulation:
    """
    Let the requests of *samples*, when and as long as they were, pass through *plan*.

    What chance did to the arrivals is then the same on both sides: measured less predicted
    varies far less than measured alone.

    Args:
        plan: file of it.
        samples: of requests that were sent.
        pace: how many times as fast they come.
        schedule: of the run; says what their prompts share.

    Raises:
        MiniclusterError: there is no simulator, or it refuses; the message is its own.
    """
    command = find_command("sizing")
    sent = sorted(samples, key=lambda s: (s.due_s, s.index))
    if not sent:
        raise MiniclusterError("no request was sent")
    asked = {request.index: request for request in schedule}
    with TemporaryDirectory(prefix="replay-") as folder:
        lines, rows = Path(folder) / "schedule.jsonl", Path(folder) / "requests.csv"
        write_schedule((_simulated(s, pace, asked.get(s.index)) for s in sent), lines)
        parts = ["simulate", str(plan), "--schedule", str(lines), "--json", "-o", str(rows)]
        try:
            done = subprocess.run(  # noqa: S603  (our own command)
                [command, *parts], capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise MiniclusterError(f"the simulator took longer than {LIMIT_S:.0f} s") from None
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise MiniclusterError(said[-1] if said else f"exit code {done.returncode}")
        return _read(rows, json.loads(done.stdout), [s.index for s in sent])


def let_in(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return those of *samples* that came as far as an engine."""
    return tuple(s for s in samples if not turned_away(s.outcome, s.detail))


def _simulated(sample: Sample, pace: float, asked: ScheduledRequest | None) -> ScheduledRequest:
    """Return a request as it was sent, with what its prompt shares, where a schedule says so."""
    request = ScheduledRequest(
        index=sample.index,
        due_s=sample.due_s / pace,
        input_tokens=sample.asked_input_tokens,
        output_tokens=sample.asked_output_tokens,
        in_window=sample.in_window,
    )
    if asked is None:
        return request
    return replace(
        request,
        content=asked.content,
        prefix_tokens=asked.prefix_tokens,
        session=asked.session,
    )


def _read(rows: Path, said: dict[str, Any], indices: Sequence[int]) -> Resimulation:
    with rows.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    names = list(said["ttft_parts_s"])
    requests = {
        index: PredictedRequest(
            ttft_s=float(row["ttft_s"]),
            tpot_s=float(row["tpot_s"]) if row["tpot_s"] else None,
            e2e_s=float(row["e2e_s"]),
            longest_stall_s=float(row["longest_stall_s"]),
            phases_s={name: float(row[f"{name.replace(' ', '_')}_s"]) for name in names},
        )
        for index, row in zip(indices, table, strict=True)
    }
    itl = said["latencies"].get("itl", {})
    return Resimulation(
        requests=requests, itl={name: float(each["value_s"]) for name, each in itl.items()}
    )
