"""Intervals on whole groups that they never saw, and the groups that rows belong to."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from sizing import catalog
from sizing.evidence.errors import class_of
from sizing.evidence.evidence import HeldOutCoverage, leave_out, read_evidence
from sizing.evidence.interval_fit import RowResidual
from sizing.evidence.measured_row import kind_of
from sizing.evidence.splits import SPLITS
from sizing.planner.error_model import interval_around, step_errors, validation
from sizing.planner.intervals import Labels
from sizing.scenario import Scenario
from tests.sizing.conftest import Sizing
from tests.sizing.evidence.rows import SPLIT, row
from tests.sizing.evidence.test_validate_cli import SAMPLE

NAMES = ("engine", "version", "family", "generation", "gpu")


def residuals(bias: float = 0.0) -> list[RowResidual]:
    """Return rows of four groups with a spread of 0.1, the last group's biased."""
    rng = np.random.default_rng(7)
    return [
        RowResidual(
            quantity="ttft",
            predicted_s=1.0,
            log_ratio=float(rng.normal(bias if group == 3 else 0.0, 0.1)),
            source=f"source-{group}",
            labels=Labels(
                kind="loaded dense",
                attention="plain",
                configuration=f"c{group}-{n % 10}",
                **{name: f"{name}-{group}" for name in NAMES},
            ),
            row_class="dense, serving, Hopper",
        )
        for group in range(4)
        for n in range(60)
    ]


def by_name(found: tuple[HeldOutCoverage, ...]) -> dict[tuple[str, str], HeldOutCoverage]:
    return {(each.of, each.name): each for each in found}


@pytest.mark.parametrize("split", [each for each in SPLITS if each != "families"])
def test_a_group_unlike_the_others_is_not_covered_without_it(split: str) -> None:
    """Rows like the others' are, in each split by its own groups; totals are of all rows."""
    even, odd = (by_name(leave_out(residuals(bias), split)) for bias in (0.0, 1.5))
    assert even["all", "all"].rows == 240
    assert even["all", "all"].covered_fraction >= 0.7
    (strange,) = (each for (of, name), each in odd.items() if of == "group" and name[-1] == "3")
    assert strange.covered_fraction < 0.1
    assert strange.median_error == pytest.approx(1 - np.exp(-1.5), abs=0.05)
    assert odd["class", "dense, serving, Hopper"].rows == 240
    assert odd["all", "all"].covered_fraction < even["all", "all"].covered_fraction


def test_two_names_are_left_out_at_a_time() -> None:
    """Rows of a family on an engine are judged by those of neither."""
    rows = [
        replace(each, labels=each.labels._replace(engine=f"engine-{n % 2}"))
        for n, each in enumerate(residuals())
    ]
    found = by_name(leave_out(rows, "family+engine"))
    assert found["all", "all"].rows == 240
    assert found["group", "family-3, engine-1"].rows == 30


def test_few_families_are_kept_and_the_others_tried() -> None:
    """Each of four families is kept alone, with one and with two neighbours."""
    found = by_name(leave_out(residuals(), "families"))
    assert {name: each.rows for (of, name), each in found.items() if of == "group"} == {
        "1": 4 * 180, "2": 4 * 120, "3": 4 * 60,
    }  # fmt: skip


def test_every_model_and_gpu_has_a_family_and_a_generation() -> None:
    """Quantised and renamed weights are of their architecture's family."""
    assert all(entry.family for entry in catalog.models().values())
    assert all(entry.generation for entry in catalog.gpus().values())
    assert catalog.model_family("meta-llama/Llama-3.1-70B") == "Llama 3"
    assert catalog.model_family("nvidia/Llama-3.1-8B-Instruct-FP8") == "Llama 3"
    assert catalog.model_family("deepseek-ai/DeepSeek-R1-0528") == "DeepSeek V3"
    assert catalog.model_family("nobody/Nothing-1B") == "nobody/Nothing-1B"
    assert catalog.gpu_generation("gb200") == catalog.gpu_generation("b300-sxm") == "Blackwell"


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ({}, "dense, serving, Hopper"),
        ({"load": "static", "batch_size": "4"}, "static"),
        ({"load": "open", "requests_per_s": "1"}, "open loop"),
        (SPLIT, "split"),
        ({"model": "openai/gpt-oss-120b"}, "MoE, serving, Hopper"),
        ({"model": "openai/gpt-oss-120b", "gpu": "gb200"}, "MoE, serving, Blackwell"),
        ({"model": "nobody/Nothing-1B"}, "unknown"),
    ],
)
def test_classes_of_rows(cells: dict[str, str], name: str) -> None:
    """The load decides where it is no closed loop, else experts and the GPU's generation."""
    assert class_of(row(**cells)) == name
    assert (kind_of(row(**cells)) == "split") == (name == "split")


def test_splits_are_printed(sizing: Sizing) -> None:
    """Each split has a table; another name is refused."""
    done = sizing("validate", str(SAMPLE), "--leave-out", "family", "--leave-out", "gpu")
    assert done.code == 0, done.err
    assert "80 % intervals learned without each family" in done.out
    assert "80 % intervals learned without each gpu" in done.out
    assert "Llama 3" in done.out
    assert sizing("validate", str(SAMPLE), "--leave-out", "colour").code == 2


def test_a_plan_says_what_was_measured_nearest_to_it() -> None:
    """A model that nothing is known of gets a wider interval than one that was measured."""
    h100 = Scenario.load(catalog.files("scenarios")["llama-3.1-70b-h100"])
    other = replace(h100, model=replace(h100.model, id="nobody/Nothing-1B", num_layers=3))
    near, far = (interval_around("ttft", each) for each in (h100, other))
    assert near is not None
    assert far is not None
    assert far.high_s / far.low_s > near.high_s / near.low_s
    own, others = (validation(each, split=True).note for each in (h100, other))
    assert "nearest measurement: its family with this engine;" in own
    assert "nearest measurement: none of its family with this engine; no such rows of" in others
    assert "nobody/Nothing-1B" in others


def test_a_gpu_without_rows_is_less_known_than_one_with_some() -> None:
    """H20 has no row; the plan says so, and bounds rise faster with confidence than the H100's."""
    h100 = Scenario.load(catalog.files("scenarios")["llama-3.1-70b-h100"])
    h20 = replace(h100, gpu=replace(h100.gpu, name="h20"))
    middle, high = ([step_errors(each, level) for each in (h100, h20)] for level in (0.5, 0.95))
    for quantity in ("ttft", "tpot"):
        near, far = (
            getattr(above, quantity) / getattr(below, quantity)
            for above, below in zip(high, middle, strict=True)
        )
        assert far > near
    assert "no such rows of h20" in validation(h20, split=False).note


def test_a_gpu_with_bad_rows_of_another_load_is_not_trusted() -> None:
    """Open loops of mean lengths on an RTX 4090 took twice as long as predicted."""
    h100 = Scenario.load(catalog.files("scenarios")["llama-3.1-8b-h100"])
    around = interval_around("ttft", replace(h100, gpu=replace(h100.gpu, name="rtx-4090")))
    assert around is not None
    assert around.high_s > 1.9


@pytest.mark.parametrize("split", [True, False])
def test_a_plan_counts_the_rows_of_deployments_like_it(*, split: bool) -> None:
    """Of the same engine, GPU, precision and pools; else those of other pools, or of its GPU."""
    h100 = Scenario.load(catalog.files("scenarios")["llama-3.1-70b-h100"])
    support = read_evidence().support
    own = {(s.engine, s.gpu, s.weight_dtype, s.split): s for s in support}
    engines, gpus, dtypes, _ = (sorted({key[at] for key in own}) for at in range(4))
    for engine, gpu, dtype in product([*engines, "other"], [*gpus, "mi355x"], dtypes):
        given = replace(
            h100,
            engine=replace(h100.engine, name=engine),
            gpu=replace(h100.gpu, name=gpu),
            model=replace(h100.model, weight_dtype=dtype),
        )
        same, unlike = (own.get((engine, gpu, dtype, kind)) for kind in (split, not split))
        beside = sum(s.rows for s in support if s.gpu == gpu)
        found = validation(given, split=split)
        assert found.num_rows == (same.rows if same else 0)
        assert f"{engine} on {gpu} ({dtype})" in found.note
        if same is None and unlike:
            assert f"nearest: {unlike.rows} rows of {'aggre' if split else 'split'}" in found.note
        elif same is None:
            nearest = f"{beside} rows of other" if beside else "none on"
            assert f"nearest: {nearest}" in found.note
