"""Files of a load test: samples, schedule and verdict, written and read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.phases import TTFT_PHASES
from minicluster.workload.samples import OUTCOMES, Sample, read_run_verdict, read_samples, to_line
from minicluster.workload.schedule import ScheduledRequest, read_schedule, write_schedule
from minicluster.workload.traces import read_trace

TIMES = st.integers(0, 10**9).map(lambda microseconds: microseconds / 10**6)
SAMPLES = st.builds(
    Sample,
    index=st.integers(0, 10**6),
    in_window=st.booleans(),
    due_s=TIMES,
    send_s=TIMES,
    end_s=TIMES,
    asked_input_tokens=st.integers(1, 10**5),
    asked_output_tokens=st.integers(1, 10**5),
    input_tokens=st.none() | st.integers(1, 10**5),
    output_tokens=st.none() | st.integers(1, 10**5),
    chunk_s=st.lists(TIMES, max_size=5).map(tuple),
    chunk_tokens=st.lists(st.integers(1, 9), max_size=5).map(tuple),
    outcome=st.sampled_from(sorted(OUTCOMES)),
    detail=st.none() | st.text(max_size=20),
    phases_s=st.dictionaries(st.sampled_from(TTFT_PHASES), TIMES),
)
ONE = Sample(
    index=0,
    in_window=True,
    due_s=1.0,
    send_s=1.0,
    end_s=5.0,
    asked_input_tokens=10,
    asked_output_tokens=4,
    input_tokens=10,
    output_tokens=4,
    chunk_s=(2.0, 5.0),
    chunk_tokens=(),
    outcome="ok",
)


@given(samples=st.lists(SAMPLES, max_size=4, unique_by=lambda s: s.index))
def test_file_gives_back_the_samples(
    tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]
) -> None:
    """What is written is read, in the order of the schedule."""
    path = tmp_path_factory.getbasetemp() / "samples.jsonl"
    torn = '{"index": 1, "in_wi'  # a client was killed while it wrote
    path.write_text("".join(to_line(s) + "\n" for s in samples) + torn, encoding="utf-8")

    assert list(read_samples(path)) == sorted(samples, key=lambda s: s.index)


@pytest.mark.parametrize(
    ("chunk_s", "chunk_tokens", "tpot_s", "gaps_s"),
    [
        ((2.0, 3.0, 5.0), (), 1.0, (1.0, 2.0)),
        ((2.0, 3.0, 5.0), (2, 1, 1), 1.5, (1.0, 2.0)),
        ((2.0, 5.0), (1, 3), 1.0, (3.0, 0.0, 0.0)),
        ((2.0,), (4,), None, ()),
        ((2.0,), (), None, ()),
        ((), (), None, ()),
    ],
)
def test_tpot_is_of_what_comes_after_the_first_chunk(
    chunk_s: tuple[float, ...],
    chunk_tokens: tuple[int, ...],
    tpot_s: float | None,
    gaps_s: tuple[float, ...],
) -> None:
    """Tokens that came together have gaps of 0 after the first of them."""
    sample = replace(ONE, chunk_s=chunk_s, chunk_tokens=chunk_tokens)

    assert sample.gaps_s == gaps_s
    assert len(sample.gap_ends_s) == len(gaps_s)
    if chunk_s:
        assert sample.tpot_s == tpot_s


BAD = to_line(ONE).replace('"due_s":1.0', '"due_s":"soon"')


@pytest.mark.parametrize("line", ["{}", "[]", "no", '{"index": 1}', BAD])
def test_bad_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(line + "\n", encoding="utf-8")

    with pytest.raises(InputError, match=r"samples\.jsonl:1"):
        read_samples(path)


REQUESTS = st.builds(
    ScheduledRequest,
    index=st.integers(0, 1000),
    due_s=st.floats(0, 1e4),
    input_tokens=st.integers(1024, 4096),
    output_tokens=st.integers(1, 4096),
    in_window=st.booleans(),
    previous=st.none() | st.integers(0, 1000),
    think_s=st.floats(0, 60),
    session=st.none() | st.integers(0, 1000),
    content=st.lists(st.integers(0, 99), max_size=2).map(tuple),
    prefix_tokens=st.integers(0, 1024),
)


@given(st.lists(REQUESTS, min_size=1, max_size=20))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, requests: list[ScheduledRequest]
) -> None:
    """Every field comes back in the same order; as a trace, what a simulation needs of it."""
    path = tmp_path_factory.getbasetemp() / "schedule.jsonl"
    write_schedule(requests, path)
    path.write_text(path.read_text().rstrip("\n"))  # as an editor may leave it
    assert list(read_schedule(path)) == requests

    requests = sorted((replace(r, previous=None) for r in requests), key=lambda r: r.due_s)
    write_schedule(requests, path)
    arrivals = read_trace(path).arrivals
    assert arrivals.due_s.tolist() == [r.due_s - requests[0].due_s for r in requests]
    assert arrivals.input_tokens.tolist() == [r.input_tokens for r in requests]
    assert arrivals.output_tokens.tolist() == [r.output_tokens for r in requests]
    assert (arrivals.content or ((),) * len(requests)) == tuple(r.content for r in requests)


@pytest.mark.parametrize("text", ["[]\n", "{}\n", "no\n", '{"index": 1, "other": 2}\n', None])
def test_another_file_is_refused(tmp_path: Path, text: str | None) -> None:
    """What is no schedule, or not there, is named."""
    path = tmp_path / "schedule.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"schedule\.jsonl"):
        read_schedule(path)


WHOLE = {"verdict": "met", "reasons": ["every limit is kept"], "window": {"start_s": 3}, "more": 1}


def test_a_verdict_is_read(tmp_path: Path) -> None:
    """Verdict, reasons and the start of what counts; without one of them the way out is named."""
    path = tmp_path / "verdict.json"
    assert read_run_verdict(path) is None
    path.write_text(json.dumps(WHOLE))
    found = read_run_verdict(path)
    assert (found.verdict, found.reasons, found.start_s) == ("met", ("every limit is kept",), 3.0)
    for key in ("verdict", "reasons", "window"):
        path.write_text(json.dumps({name: WHOLE[name] for name in WHOLE if name != key}))
        with pytest.raises(InputError, match=r"verdict\.json.*`loadtest report`"):
            read_run_verdict(path)
