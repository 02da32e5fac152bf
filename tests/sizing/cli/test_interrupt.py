"""Ctrl-C in `sizing plan` and its studies: what was found so far, and what it is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from minicluster.plan import read_plan
from sizing.cli import questions
from tests.sizing.conftest import Done, Sizing


def interrupted(*_: object) -> NoReturn:
    """Be stopped by the user."""
    raise KeyboardInterrupt


def stopped_at(function: str, sizing: Sizing, *arguments: str, command: str = "plan") -> Done:
    """Run a command until the search calls *function*."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"sizing.planner.search.{function}", interrupted)
        return sizing(command, "llama-3.1-8b-h100", "--set", "search.tp=[1]", *arguments)


def test_before_a_simulation_an_estimate_is_what_there_is(sizing: Sizing, tmp_path: Path) -> None:
    """The plan is within the budget and claims no confidence; screen, page and stderr say so."""
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    done = stopped_at("size_split_pools", sizing, "-o", str(path), "--html", str(page))
    assert done.code == 130
    assert "interrupted: the best plan so far, estimated, not simulated" in done.err
    assert "not simulated" in done.out
    assert "simulated requests" not in done.out
    plan = read_plan(path)
    assert plan.cost.gpus <= plan.inputs.cluster.max_gpus
    assert plan.prediction.ttft.p99_s < plan.slo.ttft_s
    sure = plan.confidence
    assert sure is not None
    assert (sure.fraction, sure.requests, sure.interrupted) == (0.0, 0, True)
    assert "interrupted before it verified" in page.read_text(encoding="utf-8")


def test_after_a_proof_the_plan_is_proven(sizing: Sizing, tmp_path: Path) -> None:
    """Split pools were proven before the comparison with aggregated ones was stopped."""
    path = tmp_path / "plan.json"
    done = stopped_at("size_mixed_pool", sizing, "-o", str(path))
    assert (done.code, done.err) == (130, "interrupted: the best plan so far\n")
    sure = read_plan(path).confidence
    assert sure is not None
    assert sure.interrupted
    assert (sure.fraction, sure.seeds) == (0.9, 3)


def test_studies_keep_only_what_is_proven(sizing: Sizing) -> None:
    """A point that was stopped before its proof is no point."""
    done = stopped_at("size_split_pools", sizing, "--key", "slo.ttft_s=1", command="sweep")
    assert (done.code, done.out) == (130, "")


@pytest.mark.parametrize(
    ("function", "key", "said"),
    [
        ("size_split_pools", "cluster.max_gpus=2", "nothing within 2 GPUs so far, nearest: --"),
        ("size_mixed_pool", "search.pools=mixed", "nothing found so far"),
    ],
)
def test_no_plan_is_no_plan(
    sizing: Sizing, function: str, key: str, said: str, tmp_path: Path
) -> None:
    """What exceeds the budget is named as the nearest, and not written."""
    path = tmp_path / "plan.json"
    done = stopped_at(function, sizing, "--set", key, "-o", str(path))
    assert (done.code, done.out) == (130, "")
    assert done.err.startswith(f"interrupted: {said}")
    assert not path.exists()


@contextmanager
def stopping(_: str) -> Iterator[Callable[[int, int], None]]:
    """Be stopped by the user when one thing of several is done."""

    def told(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt
        assert total > 1

    yield told


@pytest.mark.parametrize(
    ("command", "options", "found", "said"),
    [
        ("capacity", ("--gpus", "1,2,4"), "points", "2 of 3 numbers of GPUs"),
        (
            "split-map",
            ("--x", "prompt_answer_ratio=1,2", "--y", "link_bytes_per_s=1e10,1e11"),
            "points",
            "the points so far",
        ),
        ("decisions", ("--only", "router"), "decisions", "the changes so far"),
    ],
)
def test_questions_print_what_they_have(
    command: str,
    options: tuple[str, ...],
    found: str,
    said: str,
    sizing: Sizing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Screen and JSON are marked as partial, and the exit code is that of an interrupt."""
    monkeypatch.setattr(questions, "progress", stopping)
    quick = ("llama-3.1-8b-h100", "--set", "search.tp=[1]", *options)
    done = sizing(command, *quick, "--json")
    assert (done.code, done.err) == (130, f"interrupted: {said}\n")
    answer = json.loads(done.out)
    assert answer["interrupted"] is True
    assert answer[found]
    screen = sizing(command, *quick)
    assert screen.code == 130
    assert "partial: interrupted" in screen.out
