"""The job of a run and its schedule: file, options, stages, traces, and what is drawn."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.chat import FORMS
from loadtest.run.folder import as_json, held, prepare
from loadtest.run.job import Job, read_job
from loadtest.run.run_config import RunLength, free_load, make_job
from loadtest.run.schedule import (
    ArrivalShape,
    RateStage,
    Window,
    draw,
    duration_s,
    expected_requests,
    parse_stages,
    share,
    staged,
    window_of,
)
from minicluster.errors import InputError
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, RequestClass, WorkloadSpec
from minicluster.workload.schedule import ScheduledRequest
from minicluster.workload.sources import RequestSource, drawn
from tests.full_disk import small_disk
from tests.loadtest.made import JOB


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, shape=ArrivalShape(source=RequestSource(users=3)), workers=2),
        replace(JOB, shape=ArrivalShape(stages=parse_stages("5x60,10-40x120"))),
        replace(JOB, shape=ArrivalShape(skip_unanswered=True), chat=FORMS[0]),
    ],
)
def test_file_gives_back_the_job(tmp_path: Path, job: Job) -> None:
    (tmp_path / "run.json").write_text(as_json(job))

    assert read_job(tmp_path / "run.json") == job


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1}'])
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)

    with pytest.raises(InputError, match=r"run\.json"):
        read_job(tmp_path / "run.json")


def test_a_run_that_has_no_room_is_refused(tmp_path: Path) -> None:
    """In a line that says so, which its lock does not hide."""
    with small_disk(tmp_path) as disk:
        folder, no_room = disk.path / "run", pytest.raises(InputError, match="No space left")
        with disk.full(), no_room, held(folder):
            prepare(folder, JOB, JOB.requests(), None)
        with held(folder):
            prepare(folder, JOB, JOB.requests(), None)
        assert read_job(folder / "run.json") == JOB


@pytest.mark.parametrize("text", ["", "5", "5x", "x5", "-5x5", "5x0", "0x5", "5xnan", "5-x3"])
def test_bad_stages_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--stages"):
        parse_stages(text)


FREE = free_load(
    WorkloadSpec(
        requests_per_s=20.0, input_tokens=Lengths.fixed(16), output_tokens=Lengths.fixed(10)
    ),
    SloSpec(),
    model="fake",
    vocab_size=500,
)
RATES = st.floats(0.5, 100)
STAGES = st.lists(
    st.builds(RateStage, start_per_s=RATES, end_per_s=RATES, duration_s=st.floats(0.5, 100)),
    min_size=1,
    max_size=4,
)


def job(shape: ArrivalShape, extent: RunLength | None = None, trace: Path | None = None) -> Job:
    load = FREE
    if trace:
        load = replace(FREE, workload=replace(FREE.workload, trace=str(trace)))
    return make_job(load, extent or RunLength(), host="http://x", shape=shape)


def count_until(stages: list[RateStage], t: float) -> float:
    """Integrate the rate up to *t*."""
    total = 0.0
    for stage in stages:
        inside = min(t, stage.duration_s)
        slope = (stage.end_per_s - stage.start_per_s) / stage.duration_s
        total += stage.start_per_s * inside + slope * inside**2 / 2
        t -= inside
    return total


@given(STAGES, st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_stages_expect_as_many_before_each_arrival(
    stages: list[RateStage], at: list[float]
) -> None:
    """An arrival with c before it at a constant rate has c before it in the stages."""
    counts = np.sort(np.array(at)) * count_until(stages, 1e9)
    moved = staged(counts / 7.0, 7.0, stages)

    assert [count_until(stages, t) for t in moved] == pytest.approx(counts.tolist(), abs=1e-6)
    assert expected_requests(stages, duration_s(stages)) == pytest.approx(count_until(stages, 1e9))


def mooncake(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def row(t_ms: int, num_input: int = 20, num_output: int = 5) -> dict[str, Any]:
    return {"timestamp": t_ms, "input_length": num_input, "output_length": num_output}


@pytest.mark.parametrize(
    ("extent", "in_window"),
    [
        (RunLength(warmup_s=0.4), [False, True, True, True]),
        # What is due just when the window begins counts; what is due just when it ends does not.
        (RunLength(warmup_s=0.5, duration_s=8.5), [False, True, False, False]),
        (RunLength(warmup_s=0, num_requests=2), [True, True, False, False]),
        (RunLength(warmup_s=0, num_requests=4), [True, True, True, True]),
    ],
)
def test_a_trace_is_sent_as_it_is(tmp_path: Path, extent: RunLength, in_window: list[bool]) -> None:
    """Arrivals and lengths are the trace's, its silences too, as far as they are wanted."""
    shared = {"hash_ids": [4, 5, 6]}
    rows = row(0), row(500, 30, 7), row(9000, 1100) | shared, row(9000, 40)
    path = mooncake(tmp_path / "t.jsonl", *rows)
    sent = job(ArrivalShape(), extent, path).requests()

    assert [r.due_s for r in sent] == [0.0, 0.5, 9.0, 9.0]
    assert [r.input_tokens for r in sent] == [20, 30, 1100, 40]
    assert [r.output_tokens for r in sent] == [5, 7, 5, 5]
    assert [r.content for r in sent] == [(), (), (4, 5), ()]
    assert [r.in_window for r in sent] == in_window


@pytest.mark.parametrize(
    ("times_ms", "extent", "match"),
    [
        ((0, 500, 900), RunLength(num_requests=5, warmup_s=0), "at most 3"),
        ((0, 90_000), RunLength(duration_s=5, warmup_s=1), "nothing arrives"),
    ],
    ids=["too short", "silent"],
)
def test_a_window_that_a_trace_does_not_fill_is_refused(
    tmp_path: Path, times_ms: tuple[int, ...], extent: RunLength, match: str
) -> None:
    path = mooncake(tmp_path / "t.jsonl", *map(row, times_ms))
    with pytest.raises(InputError, match=match):
        job(ArrivalShape(), extent, path).requests()


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


def test_closed_loop_counts_behind_each_users_warm_up() -> None:
    """So many count as asked for, after three of each user, and others follow them."""
    shape = ArrivalShape(source=RequestSource(users=4))
    schedule = draw(LOAD, shape, WINDOW, seed=2, num_requests=50)

    assert [r.index for r in schedule if r.in_window] == list(range(12, 62))
    assert len(schedule) > 62
    assert sum(r.previous is None for r in schedule) == 4


@pytest.mark.parametrize(
    ("end_s", "match"), [(1e6, "at most 1000000"), (2.0 + 1e-9, "nothing arrives")]
)
def test_a_window_of_too_many_or_no_requests_is_refused(end_s: float, match: str) -> None:
    with pytest.raises(InputError, match=match):
        poisson(Window(start_s=2.0, end_s=end_s, drain_s=5.0), 0)


def test_a_mix_is_offered_with_enough_requests_of_each_class() -> None:
    """By their rates, with prefixes and lengths of their own; the same as the simulation draws."""
    chat = RequestClass(
        name="chat",
        requests_per_s=9.0,
        input_tokens=Lengths.fixed(100),
        output_tokens=Lengths.fixed(10),
    )
    long = replace(
        chat,
        name="long",
        requests_per_s=1.0,
        input_tokens=Lengths.fixed(900),
        prefix_tokens=50,
    )
    mix = WorkloadSpec(requests_per_s=10.0, classes=(chat, long))
    load = free_load(mix, SloSpec(percentile="p90"), model="m", vocab_size=1000)
    job = make_job(load, RunLength(seed=4), host="http://h")
    requests = job.requests()
    own = [each for each in requests if each.class_of]
    few = make_job(
        replace(load, workload=mix.apart[1]), RunLength(seed=4), host="http://h"
    ).num_requests

    assert sum(each.in_window for each in own) == pytest.approx(few, rel=0.15)
    assert {(each.input_tokens, each.prefix_tokens) for each in own} == {(900, 50)}
    assert len(own) / len(requests) == pytest.approx(0.1, abs=0.02)
    simulated = drawn(mix, RequestSource(), count=len(requests), seed=4)
    assert [each.class_of for each in requests] == simulated.class_of.tolist()
    with pytest.raises(InputError, match="none with classes"):
        make_job(
            load, RunLength(), host="http://h", shape=ArrivalShape(source=RequestSource(users=2))
        ).requests()
