from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.run.job import default_warmup_s, read_job, timeout_s, write_job
from loadtest.run.schedule import ArrivalShape
from loadtest.run.stages import parse_stages
from minicluster.errors import InputError
from minicluster.specs.workload import Lengths
from minicluster.workload.sources import RequestSource
from tests.loadtest.made import JOB

SKIPPING = ArrivalShape(skip_unanswered=True)


def test_file_gives_back_the_job(tmp_path: Path) -> None:
    stages = parse_stages("5x60,10-40x120")
    for shape in (
        ArrivalShape(),
        ArrivalShape(source=RequestSource(users=3)),
        ArrivalShape(stages=stages),
        SKIPPING,
    ):
        job = replace(JOB, shape=shape, workers=2)
        write_job(job, tmp_path / "run.json")

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
