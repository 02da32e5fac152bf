from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.job import Job, default_warmup_s, read_job, timeout_s, write_job
from loadtest.schedule import Request, Window
from sizing.errors import InputError
from sizing.specs.slo import SloSpec
from sizing.specs.workload import Lengths, WorkloadSpec

if TYPE_CHECKING:
    from pathlib import Path

JOB = Job(
    host="http://127.0.0.1:1",
    model="fake",
    vocab_size=500,
    seed=1,
    prompt_salt=2,
    workload=WorkloadSpec(
        requests_per_s=1.0,
        input_tokens=Lengths(distribution="uniform", low=20, high=900),
        output_tokens=Lengths.fixed(5),
        prefix_tokens=16,
    ),
    slo=SloSpec(),
    window=Window(start_s=5, end_s=10, drain_s=30),
    timeout_s=30.0,
    plan=None,
)


def prompt(job: Job, index: int, num_input: int) -> list[int]:
    """Return the token ids sent for one request."""
    request = Request(index=index, due_s=0, input_tokens=num_input, output_tokens=5, in_window=True)
    body = json.loads(job.body(request))
    assert body["max_tokens"] == 5
    assert body["ignore_eos"] is True
    ids: list[int] = body["prompt"]
    return ids


@given(st.integers(0, 10_000), st.integers(1, 900))
def test_prompts_have_exactly_the_length_asked(index: int, num_input: int) -> None:
    """A prompt is as many plain token ids as the schedule says."""
    ids = prompt(JOB, index, num_input)

    assert len(ids) == num_input
    assert all(3 <= token < 500 for token in ids)


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    """Only the prefix of the workload is common, within a run and between runs."""
    one, two = prompt(JOB, 1, 200), prompt(JOB, 2, 200)
    again = prompt(replace(JOB, prompt_salt=3), 1, 200)

    assert one == prompt(JOB, 1, 200)
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert one[:16] != again[:16]


def test_file_gives_back_the_job(tmp_path: Path) -> None:
    """What is written is read."""
    write_job(JOB, tmp_path / "run.json")

    assert read_job(tmp_path / "run.json") == JOB


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1}'])
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    """A run.json that is none is refused with its place."""
    (tmp_path / "run.json").write_text(text)

    with pytest.raises(InputError, match=r"run\.json"):
        read_job(tmp_path / "run.json")


def test_waits_follow_their_rules() -> None:
    """Warm-up is three requests' time, at least 5 s; the time limit ten times the SLO's, 30 s."""
    long = replace(JOB.workload, output_tokens=Lengths.fixed(1000))

    assert (default_warmup_s(0.5), default_warmup_s(10.0)) == (5.0, 30.0)
    assert timeout_s(JOB.slo, JOB.workload) == 30.0
    assert timeout_s(JOB.slo, long) == pytest.approx(510.0)
