from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.schedule import (
    Window,
    poisson_schedule,
    read_schedule,
    window_of,
    write_schedule,
)
from sizing.errors import InputError
from sizing.specs.workload import Lengths, WorkloadSpec

if TYPE_CHECKING:
    from pathlib import Path

LOAD = WorkloadSpec(
    requests_per_s=20.0,
    input_tokens=Lengths(distribution="uniform", low=10, high=90),
    output_tokens=Lengths(distribution="lognormal", median=20.0, sigma=0.5, high=100),
)
WINDOW = Window(start_s=2.0, end_s=12.0, drain_s=5.0)


@given(st.integers(0, 2**32))
def test_same_seed_same_schedule(seed: int) -> None:
    """A seed fixes arrivals and lengths; a longer run begins with the shorter one."""
    once = poisson_schedule(LOAD, WINDOW, seed)
    longer = poisson_schedule(LOAD, Window(start_s=2.0, end_s=12.0, drain_s=50.0), seed)

    assert once == poisson_schedule(LOAD, WINDOW, seed)
    assert once == longer[: len(once)]


@given(st.integers(0, 1000), st.integers(1, 500))
def test_window_of_holds_exactly_so_many(seed: int, num: int) -> None:
    """Asked for n requests, the window has n scheduled arrivals, at exactly the load's rate."""
    window = window_of(LOAD, WINDOW, num_requests=num, seed=seed)
    schedule = poisson_schedule(LOAD, window, seed)

    assert sum(r.in_window for r in schedule) == num
    assert num / window.length_s == pytest.approx(LOAD.requests_per_s)
    assert all(a.due_s < b.due_s for a, b in itertools.pairwise(schedule))
    assert schedule[-1].due_s < window.end_s + window.drain_s


def test_gaps_are_exponential() -> None:
    """Gaps pass the Kolmogorov-Smirnov test against the exponential at the rate asked."""
    schedule = poisson_schedule(LOAD, Window(start_s=0, end_s=500, drain_s=0), 1)
    gaps = np.sort(np.diff([0.0, *(r.due_s for r in schedule)]))
    expected = 1 - np.exp(-LOAD.requests_per_s * gaps)
    steps = np.arange(1, len(gaps) + 1) / len(gaps)

    distance = np.max(np.maximum(steps - expected, expected - steps + 1 / len(gaps)))
    assert distance < 1.36 / np.sqrt(len(gaps))  # the 5 % level


def test_file_gives_back_the_schedule(tmp_path: Path) -> None:
    """What is written is read."""
    schedule = poisson_schedule(LOAD, WINDOW, 3)
    write_schedule(schedule, tmp_path / "schedule.jsonl")

    assert schedule == read_schedule(tmp_path / "schedule.jsonl")


def test_too_many_requests_are_refused() -> None:
    """A schedule that one client cannot hold is refused before it is drawn."""
    with pytest.raises(InputError, match="at most 1000000"):
        poisson_schedule(LOAD, Window(start_s=0, end_s=1e6, drain_s=0), 0)


def test_empty_window_is_refused() -> None:
    """A window into which no arrival falls measures nothing."""
    with pytest.raises(InputError, match="something arrives"):
        poisson_schedule(LOAD, Window(start_s=2.0, end_s=2.0 + 1e-9, drain_s=5.0), 0)
