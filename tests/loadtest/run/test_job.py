from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.client.chat import FORMS
from loadtest.run.folder import as_json
from loadtest.run.job import Job, default_warmup_s, read_job, timeout_s
from loadtest.run.schedule import ArrivalShape
from loadtest.run.stages import parse_stages
from minicluster.errors import InputError
from minicluster.specs.workload import Lengths
from minicluster.workload.sources import RequestSource
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


def test_waits_follow_their_rules() -> None:
    """Warm-up is three requests' time, at least 5 s; the time limit ten times the SLO's, 30 s."""
    long = replace(JOB.workload, output_tokens=Lengths.fixed(1000))

    assert (default_warmup_s(0.5), default_warmup_s(10.0)) == (5.0, 30.0)
    assert timeout_s(JOB.slo, JOB.workload) == 30.0
    assert timeout_s(JOB.slo, long) == pytest.approx(510.0)


@pytest.mark.parametrize("text", ["", "5", "5x", "x5", "-5x5", "5x0", "0x5", "5xnan", "5-x3"])
def test_bad_stages_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--stages"):
        parse_stages(text)
