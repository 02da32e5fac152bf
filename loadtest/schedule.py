"""Who is sent when, and how long: one request, one line of `schedule.jsonl`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sizing.arrivals import poisson_arrivals
from sizing.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from sizing.specs.workload import WorkloadSpec

MAX_REQUESTS = 1_000_000
"""No run is longer: prompts are built and answers kept by one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to send `due_s` seconds after the start; `in_window` if it counts."""

    index: int
    due_s: float
    input_tokens: int
    output_tokens: int
    in_window: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """
    Which scheduled arrivals count: those in [start_s, end_s).

    Arrivals go on behind the window, for at most `drain_s`, so that its last requests meet
    the same load as its first.

    Attributes:
        pace: factor on the times that arrivals come after `start_s`; see `window_of`.
    """

    start_s: float
    end_s: float
    drain_s: float
    pace: float = 1.0

    @property
    def length_s(self) -> float:
        """Length of the window."""
        return self.end_s - self.start_s


def poisson_schedule(workload: WorkloadSpec, window: Window, seed: int) -> tuple[Request, ...]:
    """
    Draw the arrivals of *workload* until the window has drained; equal seeds, equal schedules.

    Raises:
        InputError: more requests than one client can hold, or none in the window.

    """
    horizon_s = window.start_s + (window.length_s + window.drain_s) / window.pace
    expected = workload.requests_per_s * horizon_s
    if expected > MAX_REQUESTS:
        raise InputError(
            "schedule",
            f"{expected:.3g} requests",
            f"at most {MAX_REQUESTS} for one client",
            "a lower rate or a shorter run",
        )
    drawn = poisson_arrivals(workload, duration_s=horizon_s, seed=seed)
    columns = zip(
        _paced(drawn.due_s, window).tolist(),
        drawn.input_tokens.tolist(),
        drawn.output_tokens.tolist(),
        strict=True,
    )
    requests = tuple(
        Request(
            index=index,
            due_s=due_s,
            input_tokens=num_input,
            output_tokens=num_output,
            in_window=window.start_s <= due_s < window.end_s,
        )
        for index, (due_s, num_input, num_output) in enumerate(columns)
    )
    if not any(request.in_window for request in requests):
        raise InputError(
            "duration_s",
            window.length_s,
            f"a window in which something arrives at {workload.requests_per_s} requests/s",
        )
    return requests


def window_of(workload: WorkloadSpec, base: Window, *, num_requests: int, seed: int) -> Window:
    """
    Return *base* ended so that exactly *num_requests* of the arrivals of *seed* fall into it.

    The window is as long as that many take on average: arrivals are paced to fit. A Poisson process
    that is known to have n arrivals in a window is n uniform ones, wherever the window ends; so
    what is measured is bursty as ever, but is the load that was asked for, not one that happens
    to be 1 / sqrt(n) more or less.
    """
    # Ten standard deviations more than needed: the arrivals that close the window are there.
    expected = num_requests + 10 * math.sqrt(num_requests) + 10
    far = replace(base, end_s=base.start_s + expected / workload.requests_per_s, drain_s=0)
    due = [r.due_s for r in poisson_schedule(workload, far, seed) if r.in_window]
    drawn_s = (due[num_requests - 1] + due[num_requests]) / 2 - base.start_s
    length_s = num_requests / workload.requests_per_s
    return replace(base, end_s=base.start_s + length_s, pace=length_s / drawn_s)


def _paced(due_s: NDArray[np.float64], window: Window) -> NDArray[np.float64]:
    """Return arrival times at the window's pace; those before it stay as they are."""
    late_s = due_s - window.start_s
    return np.where(late_s > 0, window.start_s + late_s * window.pace, due_s)


def write_schedule(requests: tuple[Request, ...], path: Path) -> None:
    """Write *requests*, a line each."""
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in requests), encoding="utf-8")


def read_schedule(path: Path) -> tuple[Request, ...]:
    """Read what `write_schedule` wrote."""
    with path.open(encoding="utf-8") as file:
        return tuple(Request(**json.loads(line)) for line in file)
