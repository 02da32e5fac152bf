"""Samples: written and read, and what they say of a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.phases import TTFT_PHASES
from minicluster.workload.samples import OUTCOMES, Sample, read_samples, to_line

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
