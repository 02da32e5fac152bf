"""The schedule of a load test, written and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.workload.schedule import ScheduledRequest, read_schedule, write_schedule
from minicluster.workload.traces import read_trace

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
