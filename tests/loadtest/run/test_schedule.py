from __future__ import annotations

import itertools
from dataclasses import replace

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
from minicluster.workload.schedule import ScheduledRequest
from minicluster.workload.sources import RequestSource, drawn

LOAD = WorkloadSpec(
    requests_per_s=20.0,
    input_tokens=Lengths(distribution="uniform", low=10, high=90),
    output_tokens=Lengths(distribution="lognormal", median=20.0, sigma=0.5, high=100),
    prefix_tokens=50,
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
    return draw(LOAD, ArrivalShape(), window, seed=seed)


@given(SOURCES, st.integers(0, 1000), st.integers(1, 5))
def test_the_simulator_draws_the_same_requests(
    source: RequestSource, seed: int, parts: int
) -> None:
    """
    Load test and simulation get the same arrivals and lengths from the same workload.

    Each request has one worker, that of the request it waits for; together they send all.
    """
    sent = draw(LOAD, ArrivalShape(source=source), WINDOW, seed=seed, num_requests=50)
    simulated = drawn(LOAD, source, count=len(sent), seed=seed)

    assert [r.input_tokens for r in sent] == simulated.input_tokens.tolist()
    assert [r.output_tokens for r in sent] == simulated.output_tokens.tolist()
    assert all(r.prefix_tokens == min(50, r.input_tokens) for r in sent)
    assert [r.session for r in sent] == (
        [None] * len(sent) if simulated.session is None else simulated.session.tolist()
    )
    first = [k for k, r in enumerate(sent) if r.previous is None]
    assert [sent[k].due_s for k in first] == simulated.due_s[first].tolist()
    before = simulated.previous if simulated.previous is not None else [-1] * len(sent)
    assert [-1 if r.previous is None else r.previous for r in sent] == list(before)

    shares = [share(sent, part, parts) for part in range(parts)]
    assert sorted(itertools.chain(*shares), key=lambda r: r.index) == list(sent)
    for mine in shares:
        assert {r.previous for r in mine} <= {None, *(r.index for r in mine)}
    roots = [sum(r.previous is None for r in mine) for mine in shares]
    assert max(roots) - min(roots) <= 1


@given(st.integers(0, 1000), st.integers(1, 500))
def test_window_of_holds_exactly_so_many(seed: int, num: int) -> None:
    window = window_of(LOAD, ArrivalShape(), WINDOW, num_requests=num, seed=seed)
    schedule = poisson(window, seed)

    longer = poisson(replace(window, drain_s=50.0), seed)

    assert schedule == longer[: len(schedule)]
    assert sum(r.in_window for r in schedule) == num
    assert all(a.due_s < b.due_s for a, b in itertools.pairwise(schedule))
    assert schedule[-1].due_s < window.end_s + window.drain_s


def test_conversations_count_as_a_whole() -> None:
    schedule = draw(LOAD, ArrivalShape(source=RequestSource(turns=4)), WINDOW, seed=2)
    by_session = itertools.groupby(schedule, key=lambda r: r.session)
    for turns in (list(group) for _, group in by_session):
        assert {r.in_window for r in turns} == {2.0 <= turns[0].due_s < 12.0}
        assert [r.due_s for r in turns[1:]] == [0.0] * (len(turns) - 1)


def test_closed_loop_counts_behind_each_users_warm_up() -> None:
    """So many count as asked for, after three of each user, and others follow them."""
    shape = ArrivalShape(source=RequestSource(users=4))
    schedule = draw(LOAD, shape, WINDOW, seed=2, num_requests=50)

    assert [r.index for r in schedule if r.in_window] == list(range(12, 62))
    assert len(schedule) > 62
    assert sum(r.previous is None for r in schedule) == 4


@pytest.mark.parametrize(
    ("end_s", "match"), [(1e6, "at most 1000000"), (2.0 + 1e-9, "something arrives")]
)
def test_a_window_of_too_many_or_no_requests_is_refused(end_s: float, match: str) -> None:
    with pytest.raises(InputError, match=match):
        poisson(Window(start_s=2.0, end_s=end_s, drain_s=5.0), 0)
