"""Two runs beside each other: what differs, and what the comparison does not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from loadtest.report.compare_page import change_rows, comparison_lines
from loadtest.run.folder import Run
from loadtest.studies.compare import RunComparison, compare_runs
from minicluster.errors import InputError
from minicluster.workload.samples import Sample
from tests.loadtest.made import judge, make_run, make_sample

WAITS = np.random.default_rng(0).exponential(0.1, 1000)


def samples_of(waits: Sequence[float], per_s: float = 100) -> list[Sample]:
    return [make_sample(k, k / per_s, ttft_s=wait) for k, wait in enumerate(waits)]


ANSWERS = samples_of(WAITS.tolist())
"""1,000 requests, answered within 10 s at latencies that vary."""


def compared(first: Run, second: Run) -> RunComparison:
    return compare_runs(judge(first), judge(second), ("a", "b"))


def test_two_runs() -> None:
    """A change of 5 % shows between runs of one schedule; another schedule is said to be one."""
    first = make_run(ANSWERS)
    found = compared(first, make_run(samples_of((1.05 * WAITS).tolist())))
    change = next(c for c in found.changes if (c.metric, c.statistic) == ("ttft", "mean"))

    assert found.paired
    assert change.significant
    assert change.low_s > 0
    assert found.notes == ()
    assert not any(c.significant for c in found.changes if c.metric == "tpot")
    assert not compared(first, make_run(samples_of(WAITS[:400].tolist(), per_s=50))).paired
    with pytest.raises(InputError, match="has no answered request"):
        compared(first, make_run([replace(s, outcome="cut") for s in ANSWERS]))


def test_a_server_that_sheds_is_no_faster() -> None:
    """Half is shed, the rest comes sooner: fewer are good, which stands first."""
    sooner = samples_of((WAITS / 2).tolist())
    shed = [replace(s, outcome="shed", chunk_s=()) if s.index % 2 else s for s in sooner]
    found = compared(make_run(ANSWERS), make_run(shed))
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


@pytest.mark.parametrize(
    ("client", "says"),
    [
        ({"cpu_fraction": 0.99}, "invalid: the load client was not fit: it was saturated"),
        ({"stop": "died"}, "failed: http://127.0.0.1:1 stopped answering"),
    ],
)
def test_a_run_that_proves_nothing_is_noted(client: dict[str, object], says: str) -> None:
    """Runs that have no verdict of their own are compared, and it is said which, and why."""
    found = compared(make_run(ANSWERS), make_run(ANSWERS, **client))

    assert len(found.notes) == 1
    assert f"the second run proves nothing by itself, it is {says}" in found.notes[0]
