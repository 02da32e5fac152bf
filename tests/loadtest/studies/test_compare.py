"""Two runs beside each other: what differs, and what the comparison does not say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from loadtest.report.compare_page import change_rows, comparison_lines, difference_text
from loadtest.studies.compare import compare_runs, to_json
from loadtest.verdict.window import measurement_window
from minicluster.workload.samples import Sample
from tests.loadtest.made import make_run, make_sample

NAMES = ("a", "b")


@pytest.fixture
def answers() -> list[Sample]:
    """Answer 1,000 requests within 10 s, at latencies that vary."""
    drawn = np.random.default_rng(0).exponential(0.1, 1000).tolist()
    return [make_sample(k, k / 100, ttft_s=value) for k, value in enumerate(drawn)]


def test_a_server_that_sheds_is_no_faster(answers: list[Sample]) -> None:
    """Half is shed, the rest comes sooner: fewer are good, which stands first."""
    shed = [
        replace(s, outcome="shed", chunk_s=()) if s.index % 2 else replace(s, chunk_s=halved(s))
        for s in answers
    ]
    found = compare_runs(make_run(answers), make_run(shed), NAMES)
    ttft = found.changes[0]

    assert found.good.difference == pytest.approx(-0.5, abs=0.01)
    assert found.good.low <= found.good.difference <= found.good.high < 0
    assert found.good.significant
    assert ttft.significant
    assert ttft.high_s < 0
    name, before, after, _, mark = next(change_rows(found))
    assert (name, mark) == ("good requests", "differs")
    assert float(before.rstrip("%")) > 99
    assert float(after.rstrip("%")) < 51
    lost = found.second.requests - found.second.answered
    assert any(f"{lost} of {found.second.requests} of the second" in note for note in found.notes)
    assert any("answered requests only" in line for line in comparison_lines(found))


def halved(sample: Sample) -> tuple[float, ...]:
    """Return the stamps of an answer whose first token came twice as soon."""
    sooner_s = sample.ttft_s / 2
    return tuple(stamp - sooner_s for stamp in sample.chunk_s)


@pytest.mark.parametrize(
    ("low_s", "high_s", "text"),
    [
        (-1e-9, 1e-9, "+0.00 to +0.00 ms"),
        (-0.00123, 0.0098, "-1.23 to +9.80 ms"),
        (-0.0782, 0.1083, "-78.2 to +108.3 ms"),
        (-11.4337, -0.5, "-11.43 to -0.50 s"),
    ],
)
def test_differences_are_in_the_unit_that_people_read(
    low_s: float, high_s: float, text: str
) -> None:
    """Both ends in that of the larger one; nothing is less than nothing."""
    assert difference_text(low_s, high_s) == text


def test_two_runs_alike(answers: list[Sample]) -> None:
    found = compare_runs(make_run(answers), make_run(answers), NAMES)
    written = json.loads(to_json(found))

    assert not any(change.significant for change in (found.good, *found.changes))
    assert found.notes == ()
    assert written["schema_version"] == 2
    assert written["good"]["p_value"] == 1


def test_marks_reckon_with_how_many_they_are() -> None:
    """A difference that would be one by itself is none among 16 figures."""
    rng = np.random.default_rng(1)
    waits = rng.exponential(0.1, (2, 500)) * [[1.0], [1.13]]
    runs = [
        make_run([make_sample(k, k / per_s, ttft_s=value) for k, value in enumerate(wait)])
        for per_s, wait in zip((50, 51), waits.tolist(), strict=True)
    ]
    found = compare_runs(runs[0], runs[1], NAMES)
    figures = (found.good, *found.changes)

    assert not found.paired
    assert any(not change.low_s <= 0 <= change.high_s for change in found.changes)
    assert min(change.p_value for change in figures) < 0.05
    assert not any(change.significant for change in figures)
    assert list(change_rows(found))[1][-1] == "chance"


@pytest.mark.parametrize(
    ("client", "says"),
    [
        ({"cpu_fraction": 0.99}, "invalid: the load client was not fit: it was saturated"),
        ({"stop": "died"}, "failed: http://127.0.0.1:1 stopped answering"),
        ({"stop": "interrupted"}, "interrupted: the run was interrupted"),
        ({"stop": "short of a worker"}, "invalid: the load client was short of a worker"),
    ],
)
def test_a_run_that_proves_nothing_is_noted(
    answers: list[Sample], client: dict[str, object], says: str
) -> None:
    """Runs that have no verdict of their own are compared, and it is said which, and why."""
    found = compare_runs(make_run(answers), make_run(answers, **client), NAMES)

    assert [note for note in found.notes if "proves nothing" in note] == [*found.notes]
    assert f"the second run proves nothing by itself, it is {says}" in found.notes[0]


def test_shares_are_paired_behind_both_warmups() -> None:
    """A cold start that only one run had is cut from both before their requests are paired."""
    warm = [make_sample(k, k / 100, ttft_s=1.5 if k % 9 == 0 else 0.05) for k in range(1000)]
    cold = [replace(s, chunk_s=tuple(t + 5 for t in s.chunk_s)) for s in warm[:200]] + warm[200:]
    first, second = make_run(warm), make_run(cold)
    found = compare_runs(first, second, NAMES)

    assert len(measurement_window(second).requests) < len(measurement_window(first).requests)
    assert found.paired
    assert (found.good.low, found.good.high) == (0, 0)
