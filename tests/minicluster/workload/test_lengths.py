"""Lengths that were counted: a log's mean, p99 and pairs pass through rows, draws and quantiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from loadtest.run.run_config import RunLength, free_load, make_job
from minicluster.errors import InputError
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import MOST_ROWS, Lengths, RequestClass, WorkloadSpec
from minicluster.workload.arrivals import equally_likely
from minicluster.workload.lengths import independent_rows, length_rows, request_quantiles
from minicluster.workload.sources import RequestSource, drawn
from sizing.catalog.scenario import scenario_from
from sizing.stacks.traffic import read_traffic

Shape = tuple[NDArray[np.int64], NDArray[np.int64]]
COUNT = 8_000


def shapes() -> dict[str, Shape]:
    """Return prompts and answers of logs of many kinds."""
    rng = np.random.default_rng(7)
    normal, other = rng.standard_normal((2, COUNT))
    long = rng.random(COUNT) < 0.1

    def tokens(values: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.maximum(1, np.rint(values)).astype(np.int64)

    return {
        "alike": (np.full(COUNT, 700), np.full(COUNT, 90)),
        "mixture": (np.where(long, 12_000, 300), np.where(long, 40, 250)),
        "three kinds": (rng.choice([90, 2_000, 60_000], COUNT, p=[0.7, 0.28, 0.02]),
                        rng.integers(20, 900, COUNT)),
        "lognormal": (tokens(np.exp(6 + normal)), tokens(np.exp(5 + 0.8 * other))),
        "heavy tail": (tokens(200 * (1 + rng.pareto(1.3, COUNT))), tokens(np.exp(4 + 1.5 * other))),
        "long with long": (tokens(np.exp(6 + normal)), tokens(np.exp(5 + normal + other / 3))),
        "long with short": (tokens(np.exp(6 + normal)), tokens(np.exp(5 - 0.9 * normal))),
        "one token": (rng.integers(1, 4, COUNT), rng.integers(1, 3, COUNT)),
        "two answers": (rng.integers(900, 1_100, COUNT), rng.choice([1, 4_000], COUNT)),
    }  # fmt: skip


def statistics(prompts: ArrayLike, answers: ArrayLike) -> dict[str, float]:
    """Return what a load must keep: means, percentiles, longest, and how lengths go together."""
    pairs = {"prompt": np.asarray(prompts, float), "answer": np.asarray(answers, float)}
    found = {f"mean {name}": float(each.mean()) for name, each in pairs.items()}
    found |= {f"p99 {name}": float(np.quantile(each, 0.99)) for name, each in pairs.items()}
    return found | {"together": float((pairs["prompt"] * pairs["answer"]).mean())}


def log_of(shape: Shape, folder: Path) -> Path:
    """Write an access log of requests with these lengths, two a second."""
    lines = [
        json.dumps({"time": 1_790_000_000 + at / 2, "prompt_tokens": n, "output_tokens": o})
        for at, (n, o) in enumerate(zip(shape[0].tolist(), shape[1].tolist(), strict=True))
    ]
    file = folder / "access.log"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("kind", shapes())
def test_a_log_becomes_a_load_and_its_requests_again(tmp_path: Path, kind: str) -> None:
    """
    Log, table of a scenario, and requests of simulation and load test: the same statistics.

    What is written keeps 2 % of means and 99th percentiles; draws of 80,000 add what chance adds.
    """
    shape = shapes()[kind]
    traffic = read_traffic(log_of(shape, tmp_path))
    true = statistics(*shape)
    prompts, answers, counts = np.array(traffic.lengths).T
    written = statistics(np.repeat(prompts, counts), np.repeat(answers, counts))
    assert {name: written[name] for name in true if name != "together"} == pytest.approx(
        {name: value for name, value in true.items() if name != "together"}, rel=0.02
    )
    assert written["together"] == pytest.approx(true["together"], rel=0.05)
    assert (prompts.max(), answers.max()) == (shape[0].max(), shape[1].max())
    assert counts.sum() == COUNT

    workload = WorkloadSpec(requests_per_s=2.0, lengths=traffic.lengths)
    simulated = drawn(workload, RequestSource(), count=80_000, seed=1)
    chance = {"heavy tail": 0.15, "three kinds": 0.08}.get(kind, 0.05)
    found = statistics(simulated.input_tokens, simulated.output_tokens)
    assert found == pytest.approx(true, rel=chance)
    load = free_load(workload, SloSpec(), model="m", vocab_size=32_000)
    job = make_job(load, RunLength(duration_s=20_000.0), host="http://127.0.0.1:1")
    sent = job.requests()
    lengths = [(each.input_tokens, each.output_tokens) for each in sent]
    assert statistics(*zip(*lengths, strict=True)) == pytest.approx(true, rel=2 * chance)


@pytest.mark.parametrize("kind", shapes())
def test_equally_likely_requests_stand_for_the_rows(kind: str) -> None:
    """Closed forms average over 128 requests: their means are exact, and pairs stay pairs."""
    shape = shapes()[kind]
    rows = length_rows(*shape, place="log")
    workload = WorkloadSpec(requests_per_s=1.0, lengths=rows)
    found = equally_likely(workload, 128)
    prompts, answers, counts = np.array(rows, dtype=float).T
    assert found.input_tokens.mean() == pytest.approx(np.average(prompts, weights=counts))
    assert found.output_tokens.mean() == pytest.approx(np.average(answers, weights=counts))
    assert (np.diff(found.input_tokens) >= 0).all()
    together = np.average(prompts * answers, weights=counts)
    assert (found.input_tokens * found.output_tokens).mean() == pytest.approx(together, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(1, 200_000), st.integers(1, 50_000)), min_size=1, max_size=300
    ),
    count=st.integers(1, 200),
)
def test_rows_and_their_quantiles_keep_means(pairs: list[tuple[int, int]], count: int) -> None:
    """Whatever the lengths, rows count every request and have its means and its longest."""
    lengths = np.array(pairs)
    rows = length_rows(lengths[:, 0], lengths[:, 1], place="log")
    assert sum(number for *_, number in rows) == len(pairs)
    assert len(rows) <= MOST_ROWS
    part = RequestClass(name="", requests_per_s=1.0, lengths=rows)
    assert part.longest_prompt_tokens == lengths[:, 0].max()
    assert part.longest_answer_tokens == lengths[:, 1].max()
    assert part.longest_tokens == lengths.sum(axis=1).max()
    for column, each in zip(lengths.T, request_quantiles(part, count), strict=True):
        assert each.mean() == pytest.approx(column.mean(), rel=0.02)


def test_lengths_of_two_histograms_are_independent() -> None:
    """Rows of lengths that are known apart have both means, and no more correlation than chance."""
    prompts, answers = np.sort(np.random.default_rng(2).lognormal(6, 1, (2, 5_000)))
    rows = np.array(independent_rows(prompts, answers, 256))
    assert rows[:, 0].mean() == pytest.approx(prompts.mean(), rel=0.005)
    assert rows[:, 1].mean() == pytest.approx(answers.mean(), rel=0.005)
    assert abs(np.corrcoef(np.log(rows[:, :2].T))[0, 1]) < 0.03


def scenario(**workload: object) -> dict[str, Any]:
    """Return a parsed scenario with this load."""
    cluster = {"gpu": "h100-sxm", "gpus_per_node": 8, "max_gpus": 8}
    return {"model": {"id": "llama-3.1-8b"}, "cluster": cluster, "workload": workload}


def test_a_scenario_takes_a_trace(tmp_path: Path) -> None:
    """Lengths are the trace's and the rate that of its busiest minutes, unless one is given."""
    shape = shapes()["mixture"]
    trace = str(log_of(shape, tmp_path))
    load = scenario_from(scenario(trace=trace), place="s").workload
    assert load.requests_per_s == pytest.approx(2.0, rel=0.01)
    assert load.lengths == length_rows(*shape, place="log")
    faster = scenario_from(scenario(trace=trace, requests_per_s=7.0), place="s").workload
    assert (faster.requests_per_s, faster.lengths) == (7.0, load.lengths)
    # One override takes the place of what the file says.
    plain = scenario(requests_per_s=3.0, input_tokens=500, output_tokens=50)
    assert scenario_from(plain, [f"workload.trace={trace}"], place="s").workload == load
    back = scenario(trace=trace)
    given = ["workload.input_tokens=500", "workload.output_tokens=50", "workload.requests_per_s=3"]
    assert scenario_from(back, given, place="s").workload == WorkloadSpec(
        requests_per_s=3.0, input_tokens=Lengths.fixed(500), output_tokens=Lengths.fixed(50)
    )


def test_a_trace_of_no_certain_unit_is_converted_first(tmp_path: Path) -> None:
    """A scenario has no options for it: the error names the command that has."""
    file = tmp_path / "log"
    rows = [{"time": 50 * n, "prompt_tokens": 5, "output_tokens": 5} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        InputError, match=r"as seconds .*`sizing traffic .* --time-unit UNIT -o TRACE`"
    ):
        scenario_from(scenario(trace=str(file)), place="s")


def test_a_trace_without_a_rate_says_so(tmp_path: Path) -> None:
    """Requests at one instant have lengths, and no rate; nor have lengths in place of a trace."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"due_s": 0, "input_tokens": 5, "output_tokens": 5}\n' * 3)
    with pytest.raises(InputError, match="all come at once"):
        scenario_from(scenario(trace=str(file)), place="s")
    load = scenario_from(scenario(trace=str(file), requests_per_s=1.0), place="s").workload
    assert load.lengths == ((5, 5, 3),)
    tokens = ["workload.input_tokens=5", "workload.output_tokens=5"]
    with pytest.raises(InputError, match="the place of the trace"):
        scenario_from(scenario(trace=str(file)), tokens, place="s")


@pytest.mark.parametrize(
    ("workload", "place", "message"),
    [
        ({"lengths": [[1, 2, 3]], "input_tokens": 5}, "input_tokens", "beside lengths"),
        ({"lengths": [[1, 2, 0]]}, "lengths.0", "each 1 to"),
        ({"lengths": [[1, 2]]}, "lengths.0", "a value"),
        ({"lengths": [[1, 2, 3], [1, 2.5, 3]]}, "lengths.1.1", "a whole number"),
        ({"lengths": [[1, 1, 1]] * 5_000}, "lengths", "at most 4,096 rows"),
        ({"lengths": [[10, 2, 3]], "prefix_tokens": 10}, "prefix_tokens", "longest input, 10"),
        ({"trace": "nowhere.log"}, "s: workload.trace: nowhere.log", "does not exist"),
        ({"trace": "t", "input_tokens": 5}, "input_tokens", "beside trace"),
        ({}, "input_tokens", "`lengths`"),
    ],
)
def test_impossible_lengths_are_refused(workload: dict[str, Any], place: str, message: str) -> None:
    """The message names the key and what was expected."""
    with pytest.raises(InputError) as refused:
        scenario_from(scenario(requests_per_s=1.0, **workload), place="s")
    assert place in refused.value.place
    assert message in str(refused.value)
