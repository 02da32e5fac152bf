from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.run.schedule import (
    ArrivalShape,
    Window,
    draw,
    share,
    window_of,
)
from minicluster.errors import InputError
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import poisson_arrivals
from minicluster.workload.schedule import ScheduledRequest, read_schedule, write_schedule
from minicluster.workload.sources import RequestSource, drawn

if TYPE_CHECKING:
    from pathlib import Path

LOAD = WorkloadSpec(
    requests_per_s=20.0,
    input_tokens=Lengths(distribution="uniform", low=10, high=90),
    output_tokens=Lengths(distribution="lognormal", median=20.0, sigma=0.5, high=100),
)
WINDOW = Window(start_s=2.0, end_s=12.0, drain_s=5.0)


SOURCES = st.sampled_from(
    [
        RequestSource(),
        RequestSource(process="gamma", gap_cv=2.0),
        RequestSource(process="constant"),
        RequestSource(turns=3, think_s=0.5),
        RequestSource(users=4, think_s=0.1),
    ]
)


def poisson(window: Window, seed: int) -> tuple[ScheduledRequest, ...]:
    """Draw the Poisson arrivals of the load."""
    return draw(LOAD, ArrivalShape(), window, seed=seed)


@given(st.integers(0, 2**32))
def test_same_seed_same_schedule(seed: int) -> None:
    """A seed fixes arrivals and lengths; a longer run begins with the shorter one."""
    once = poisson(WINDOW, seed)
    longer = poisson(Window(start_s=2.0, end_s=12.0, drain_s=50.0), seed)

    assert once == poisson(WINDOW, seed)
    assert once == longer[: len(once)]


@given(SOURCES, st.integers(0, 1000))
def test_the_simulator_draws_the_same_requests(source: RequestSource, seed: int) -> None:
    """Load test and simulation get the same arrivals and lengths from the same workload."""
    sent = draw(LOAD, ArrivalShape(source=source), WINDOW, seed=seed, num_requests=50)
    simulated = drawn(LOAD, source, count=len(sent), seed=seed)

    assert [r.input_tokens for r in sent] == simulated.input_tokens.tolist()
    assert [r.output_tokens for r in sent] == simulated.output_tokens.tolist()
    assert [r.session for r in sent] == (
        [None] * len(sent) if simulated.session is None else simulated.session.tolist()
    )
    first = [k for k, r in enumerate(sent) if r.previous is None]
    assert [sent[k].due_s for k in first] == simulated.due_s[first].tolist()
    before = simulated.previous if simulated.previous is not None else [-1] * len(sent)
    assert [-1 if r.previous is None else r.previous for r in sent] == list(before)


def test_poisson_is_what_plans_are_simulated_with() -> None:
    """Without a shape the arrivals are those of `poisson_arrivals`."""
    simulated = poisson_arrivals(LOAD, duration_s=17.0, seed=5)

    assert [r.due_s for r in poisson(WINDOW, 5)] == simulated.due_s.tolist()


@given(st.integers(0, 1000), st.integers(1, 500))
def test_window_of_holds_exactly_so_many(seed: int, num: int) -> None:
    """Asked for n requests, the window has n scheduled arrivals, and others follow it."""
    window = window_of(LOAD, ArrivalShape(), WINDOW, num_requests=num, seed=seed)
    schedule = poisson(window, seed)

    assert sum(r.in_window for r in schedule) == num
    assert all(a.due_s < b.due_s for a, b in itertools.pairwise(schedule))
    assert schedule[-1].due_s < window.end_s + window.drain_s


@given(SOURCES, st.integers(0, 100), st.integers(1, 5))
def test_shares_are_a_partition(source: RequestSource, seed: int, parts: int) -> None:
    """Each request has one worker, that of the request it waits for; together they are all."""
    whole = draw(LOAD, ArrivalShape(source=source), WINDOW, seed=seed, num_requests=50)
    shares = [share(whole, part, parts) for part in range(parts)]
    sent = [{r.index for r in part} for part in shares]

    assert sorted(itertools.chain(*shares), key=lambda r: r.index) == list(whole)
    assert all(
        r.previous is None or r.previous in mine
        for part, mine in zip(shares, sent, strict=True)
        for r in part
    )


def test_conversations_count_as_a_whole() -> None:
    """All turns of a conversation are in the window if its first one is due in it."""
    schedule = draw(LOAD, ArrivalShape(source=RequestSource(turns=4)), WINDOW, seed=2)
    by_session = itertools.groupby(schedule, key=lambda r: r.session)
    for turns in (list(group) for _, group in by_session):
        assert {r.in_window for r in turns} == {2.0 <= turns[0].due_s < 12.0}


def test_closed_loop_counts_behind_each_users_warm_up() -> None:
    """So many count as asked for, after three of each user, and others follow them."""
    shape = ArrivalShape(source=RequestSource(users=4))
    schedule = draw(LOAD, shape, WINDOW, seed=2, num_requests=50)

    assert [r.index for r in schedule if r.in_window] == list(range(12, 62))
    assert len(schedule) > 62
    assert sum(r.previous is None for r in schedule) == 4


def test_gaps_are_exponential() -> None:
    """Gaps pass the Kolmogorov-Smirnov test against the exponential at the rate asked."""
    schedule = poisson(Window(start_s=0, end_s=500, drain_s=0), 1)
    gaps = np.sort(np.diff([0.0, *(r.due_s for r in schedule)]))
    expected = 1 - np.exp(-LOAD.requests_per_s * gaps)
    steps = np.arange(1, len(gaps) + 1) / len(gaps)

    distance = np.max(np.maximum(steps - expected, expected - steps + 1 / len(gaps)))
    assert distance < 1.36 / np.sqrt(len(gaps))  # the 5 % level


def test_file_gives_back_the_schedule(tmp_path: Path) -> None:
    """What is written is read."""
    schedule = draw(LOAD, ArrivalShape(source=RequestSource(turns=2)), WINDOW, seed=3)
    write_schedule(schedule, tmp_path / "schedule.jsonl")

    assert schedule == read_schedule(tmp_path / "schedule.jsonl")


def test_too_many_requests_are_refused() -> None:
    """A schedule that one client cannot hold is refused before it is drawn."""
    with pytest.raises(InputError, match="at most 1000000"):
        poisson(Window(start_s=0, end_s=1e6, drain_s=0), 0)


def test_empty_window_is_refused() -> None:
    """A window into which no arrival falls measures nothing."""
    with pytest.raises(InputError, match="something arrives"):
        poisson(Window(start_s=2.0, end_s=2.0 + 1e-9, drain_s=5.0), 0)
