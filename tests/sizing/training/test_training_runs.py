"""Published training runs: our estimates within the tolerance of their group."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sizing.training.step import BUSY_FRACTION

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import training_runs  # noqa: E402  (a script, beside the packages)

RUNS = list(training_runs.runs())
FITTED = ("korthikanti", "megatron", "llama")


def name(run: training_runs.Run) -> str:
    return f"{run.group} {run.name} {run.keys.get('recompute', '')}"


@pytest.mark.parametrize("run", [r for r in RUNS if r.tolerance is not None], ids=name)
def test_published_runs(run: training_runs.Run) -> None:
    assert run.published
    for quantity, error in run.errors().items():
        assert abs(error) < (run.tolerance or 0), (quantity, error)


@pytest.mark.parametrize("run", [r for r in RUNS if r.group in FITTED], ids=name)
def test_published_runs_whose_layout_is_chosen(run: training_runs.Run) -> None:
    """Micro-batch and chunks of our own meet the same tolerances."""
    keys = {k: v for k, v in run.keys.items() if k not in {"micro_batch", "interleave"}}
    for quantity, error in replace(run, keys=keys).errors().items():
        assert abs(error) < (run.tolerance or 0), (quantity, error)


def test_figures_that_the_runs_have_to_meet() -> None:
    """No group's tolerance is wider than it should be, and no published group went missing."""
    held = {run.group: run.tolerance for run in RUNS if run.tolerance is not None}
    assert held["korthikanti"] == held["korthikanti_memory"] == 0.10
    assert held["megatron"] == held["megatron_parallel"] == held["llama"] == 0.15
    assert len(RUNS) == 67


@pytest.mark.parametrize("run", [r for r in RUNS if r.group == "megatron"], ids=name)
def test_parameters_of_megatron(run: training_runs.Run) -> None:
    published = float(run.name.removesuffix("B"))
    assert round(run.estimate().parameters / 1e9, 1) == published


@pytest.mark.parametrize("run", [r for r in RUNS if r.group == "llama"], ids=name)
def test_layouts_of_llama_fit(run: training_runs.Run) -> None:
    assert run.estimate().fits


def test_gaps_are_what_published_step_times_say() -> None:
    """The one fitted share is the geometric mean over 21 rows, to a hundredth."""
    logs = [
        np.log1p(error) * (1 if quantity == "step_s" else -1)
        for run in RUNS
        if run.group in FITTED
        for quantity, error in run.errors().items()
    ]
    assert len(logs) == 21
    assert abs(BUSY_FRACTION * np.exp(np.mean(logs)) - BUSY_FRACTION) < 0.01
