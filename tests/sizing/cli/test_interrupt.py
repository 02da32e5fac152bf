"""Ctrl-C in `sizing plan`: the best plan so far, and what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from minicluster.plan import read_plan
from sizing.cli import main

SCENARIO = "llama-3.1-70b-h100"
SEARCH = "sizing.planner.search"


def interrupted(*_: object) -> NoReturn:
    """Be stopped by the user."""
    raise KeyboardInterrupt


def stopped_at(function: str, *arguments: str, command: str = "plan") -> int | str | None:
    """Plan until the search calls *function*; return the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sizing", command, SCENARIO, *arguments])
        patch.setattr(f"{SEARCH}.{function}", interrupted)
        with pytest.raises(SystemExit) as left:
            main()
    return left.value.code


def test_before_a_simulation_an_estimate_is_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is within the budget and claims no confidence; screen, page and stderr say so."""
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert stopped_at("size_split_pools", "-o", str(path), "--html", str(page)) == 130
    streams = capsys.readouterr()
    assert "interrupted: the best plan so far, estimated, not simulated" in streams.err
    assert "not simulated" in streams.out
    assert "simulated requests" not in streams.out
    plan = read_plan(path)
    assert plan.cost.gpus <= plan.inputs.cluster.max_gpus
    assert plan.prediction.ttft.p99_s < plan.slo.ttft_s
    sure = plan.confidence
    assert sure is not None
    assert (sure.fraction, sure.requests, sure.interrupted) == (0.0, 0, True)
    assert "interrupted before it simulated" in page.read_text(encoding="utf-8")


def test_after_a_proof_the_plan_is_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Split pools were proven before the comparison with aggregated ones was stopped."""
    path = tmp_path / "plan.json"
    assert stopped_at("size_mixed_pool", "-o", str(path)) == 130
    assert capsys.readouterr().err == "interrupted: the best plan so far\n"
    sure = read_plan(path).confidence
    assert sure is not None
    assert sure.interrupted
    assert (sure.fraction, sure.seeds) == (0.9, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--key", "slo.ttft_s=1"),
        ("compare", "--gpu", "h100-sxm,h200-sxm"),
        ("sensitivity",),
    ],
)
def test_studies_keep_only_what_is_proven(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A point that was stopped before its proof is no point."""
    command, *options = arguments
    assert stopped_at("size_split_pools", *options, command=command) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("function", "key", "said"),
    [
        (
            "size_split_pools",
            "cluster.max_gpus=40",
            "nothing within 40 GPUs so far, nearest: --prefill",
        ),
        (
            "size_mixed_pool",
            "cluster.max_gpus=40",
            "nothing within 40 GPUs so far, nearest: --prefill",
        ),
        ("size_mixed_pool", "search.pools=mixed", "nothing found so far"),
    ],
)
def test_no_plan_is_no_plan(
    function: str, key: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What exceeds the budget is named as the nearest, and not written."""
    path = tmp_path / "plan.json"
    assert stopped_at(function, "--set", key, "-o", str(path)) == 130
    streams = capsys.readouterr()
    assert streams.err.startswith(f"interrupted: {said}")
    assert streams.out == ""
    assert not path.exists()
