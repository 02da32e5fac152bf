"""Plans with speculative decoding: keys, what is planned, explained and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from minicluster.plan import read_plan, to_json
from minicluster.specs.scenario import EngineChoice, ModelChoice
from minicluster.specs.workload import Lengths, WorkloadSpec
from sizing.planner import bounds
from sizing.planner.candidates import one_replica_each
from sizing.planner.explanation import explain_plan
from sizing.planner.layout import Layout
from sizing.planner.plan import build_plan
from sizing.planner.step_models import StepModels
from sizing.report.tables import explanation_sections
from sizing.report.terminal import print_sections
from tests.sizing.scenarios import LARGE, SMALL, found, inputs, proposed

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from tests.sizing.conftest import Sizing

MTP = replace(
    LARGE,
    model=ModelChoice(id="deepseek-v3"),
    cluster=replace(LARGE.cluster, preset="h200-8", max_gpus=128),
    workload=WorkloadSpec(
        requests_per_s=2.0, input_tokens=Lengths.fixed(1000), output_tokens=Lengths.fixed(200)
    ),
    search=replace(LARGE.search, tp=(8,)),
)


def drafting(drafts: int, accepted: float) -> Inputs:
    engine = EngineChoice(speculative_tokens=drafts, mean_accepted_tokens=accepted)
    return inputs(replace(MTP, engine=engine))


def test_no_drafts_is_today_bit_by_bit() -> None:
    """A scenario that says 0 drafts gets the prediction, pools and engine of one that says none."""
    engine = EngineChoice(speculative_tokens=0, mean_accepted_tokens=0.0)
    said = build_plan(given := inputs(replace(SMALL, engine=engine)), found(given))
    silent = proposed(inputs(SMALL))
    for part in ("prediction", "pools", "engine", "step_model", "headroom", "confidence"):
        assert getattr(said, part) == getattr(silent, part)


def test_a_plan_carries_its_drafts_and_reads_them_back(tmp_path: Path) -> None:
    """Engine, model and simulated TPOT; the explanation names draft and verification."""
    plan = proposed(drafting(1, 0.85))
    file = tmp_path / "plan.json"
    file.write_text(to_json(plan))
    again = read_plan(file)
    assert again == plan
    assert (again.engine.speculative_tokens, again.engine.mean_accepted_tokens) == (1, 0.85)
    assert again.model.draft is not None
    terms = explain_plan(again)
    assert (terms.drafts, terms.tokens_per_step) == (1, 1.85)
    names = {term.name for term in terms.terms if term.of == "decode step"}
    assert {"draft combine", "draft lm_head", "lm_head"} <= names
    console = Console(width=80, record=True, file=StringIO())
    print_sections(explanation_sections(terms), console)
    assert "…" not in console.export_text()
    assert plan.prediction.itl.p50_s > plan.prediction.tpot.p50_s
    assert "none of them with speculative decoding" in plan.validated_on.note


def test_the_bounds_count_tokens_of_a_step() -> None:
    """TPOT alone is a step over 1 + a, the gaps a step; decode's load falls by about as much."""
    offered = []
    for accepted in (0.0, 1.0):
        given = drafting(1, accepted)
        models = StepModels(given)
        one = one_replica_each(models, Layout.split(8, 8, given.gpu.name))
        offered.append(models.load(one))
    none, all_ = (bounds.unloaded_s(each) for each in offered)
    assert all_["itl"] == pytest.approx(none["itl"])
    assert all_["tpot"] == pytest.approx(none["tpot"] / 2)
    loads = [bounds.busy_decode(each) for each in offered]
    assert loads[1] == pytest.approx(loads[0] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("speculative_tokens=1",), "engine.mean_accepted_tokens is missing"),
        (("mean_accepted_tokens=0.5",), "engine.speculative_tokens is missing"),
        (("speculative_tokens=1", "mean_accepted_tokens=1.5"), "1.5; it has to be at most"),
        (
            ("speculative_tokens=1", "mean_accepted_tokens=-0.1"),
            "-0.1; it has to be a number from 0",
        ),
        (
            ("speculative_tokens=99", "mean_accepted_tokens=1"),
            "99; it has to be a number from 0 to 32",
        ),
        (("speculative_tokens=1.5", "mean_accepted_tokens=1"), "1.5; it has to be"),
        (("speculative_tokens=3", "mean_accepted_tokens=2"), "llama-3.1-70b has no draft head"),
        (
            ("speculative_tokens=7", "mean_accepted_tokens=2", "max_num_seqs=2000"),
            "2000; it has to be at most 1,024: the tokens in a step of vllm 0.29.0 on h100-sxm",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(
    sizing: Sizing, changes: tuple[str, ...], said: str
) -> None:
    """Place, value and expectation; exit code 2."""
    options = [word for change in changes for word in ("--set", f"engine.{change}")]
    done = sizing("plan", "llama-3.1-70b-h100", *options)
    assert done.code == 2
    assert said in " ".join(done.err.split())


def test_a_calibrated_machine_knows_no_drafts(
    sizing: Sizing, laptop: tuple[str, ...], tmp_path: Path
) -> None:
    """Its steps were timed without, also where the model has layers that could draft."""
    config = json.loads(Path(laptop[2].removeprefix("model.id="), "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafts = ("engine.speculative_tokens=1", "engine.mean_accepted_tokens=0.5")
    options = [word for each in (f"model.id={tmp_path}", *drafts) for word in ("--set", each)]
    done = sizing("plan", laptop[0], *options, *laptop[3:])
    assert done.code == 2
    assert "engine.speculative_tokens is 1; it has to be 0 with a calibration" in done.err
