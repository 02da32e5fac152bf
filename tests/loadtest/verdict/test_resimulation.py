"""The prediction made again for the requests of a run, and phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.request import reported_phases
from loadtest.report.judge import judge_run
from loadtest.report.table import pace_text, prediction_text
from loadtest.run.folder import Run, as_json, prepare
from loadtest.verdict.prediction import compare_phases
from loadtest.verdict.resimulation import Resimulation, resimulate
from loadtest.verdict.verdict import Verdict
from minicluster.errors import InputError, MiniclusterError
from minicluster.workload.engine_steps import ENGINE_STEPS, EngineStep, write_engine_steps
from minicluster.workload.samples import Sample
from tests.loadtest.made import REQUEST, judged, leave, make_plan, make_run, make_sample, plan_json


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan whose prefill takes 10 ms + 0.1 ms a token, and a decode step 10 ms."""
    return plan_json(make_plan(), tmp_path_factory.mktemp("plan"))


def simulated(plan: Path, samples: Sequence[Sample], **shared: Any) -> Resimulation:  # noqa: ANN401
    """Simulate *samples*, whose prompts have *shared*."""
    return resimulate(plan, samples, [replace(REQUEST, index=s.index, **shared) for s in samples])


def as_simulated(*, apart_s: float = 1.0) -> list[Sample]:
    """Return requests that never meet one another: prefill 13.2 ms, first step, nine more."""
    told = {"queued_prefill": 0.0132, "handoff": 0.02}
    return [
        make_sample(k, k * apart_s, ttft_s=0.0332, itl_s=0.01, phases_s=told) for k in range(60)
    ]


@pytest.fixture(scope="module")
def alone(plan_file: Path) -> Resimulation:
    """Simulate requests that never meet, given in any order."""
    return simulated(plan_file, list(reversed(as_simulated())))


def test_requests_alone_take_what_the_formulas_say(alone: Resimulation) -> None:
    """A request that meets no other takes what the step model says, in the run's order."""
    assert sorted(alone.requests) == list(range(60))
    one = alone.requests[7]
    assert one.phases_s["prefill"] == pytest.approx(0.01 + 32e-4)
    assert one.phases_s["prefill_queue"] == pytest.approx(0.0)
    assert one.tpot_s == pytest.approx(0.01)
    assert sum(one.phases_s.values()) == pytest.approx(one.ttft_s)
    assert alone.itl["mean"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("shared", "computed"),
    [
        ({}, 160),
        # Of prompts that share two blocks only the rest takes prefill's time.
        ({"input_tokens": 160, "prefix_tokens": 64}, 96),
        # The second turn of a conversation computes what is new in it.
        ({"input_tokens": 160, "session": 7}, 96),
    ],
    ids=["nothing", "prefix", "conversation"],
)
def test_what_prompts_share_is_not_computed(
    plan_file: Path, shared: dict[str, int], computed: int
) -> None:
    turns = [
        make_sample(4, 0.0, asked_input_tokens=64),
        make_sample(9, 5.0, asked_input_tokens=160),
    ]
    found = resimulate(
        plan_file,
        turns,
        [
            replace(REQUEST, index=4, input_tokens=64, session=shared.get("session")),
            replace(REQUEST, index=9, **{"input_tokens": 160, **shared}),
        ],
    )

    assert found.requests[9].phases_s["prefill"] == pytest.approx(0.01 + computed * 1e-4)


PULLED = reported_phases(
    {"prefill_queue": 0.0, "prefill": 0.0132, "handoff": 0.12},
    {"queue_time": 0.108, "time_to_first_token": 0.01},
)
COMPUTED_BY_DECODE = reported_phases(
    {"queued_prefill": 0.033, "kv_fetch": 0.0, "first_decode_step": 0.0},
    {"queue_time": 0.003, "time_to_first_token": 0.03},
)
APART = {"prefill_queue": 0.0, "prefill": 0.0132, "handoff": 0.02}


@pytest.mark.parametrize(
    ("reported", "earlier_s", "measured_s", "explains"),
    [
        ({}, 0.0, {"ttft": 0.0332}, "ttft"),
        ({"queued_prefill": 0.0132, "handoff": 0.5}, 0.48, {"handoff": 0.5}, "handoff"),
        (APART, 0.0, APART, "handoff"),
        (PULLED, 0.1, {"kv_fetch": 0.11, "first_decode_step": 0.01}, "kv_fetch"),
        (
            COMPUTED_BY_DECODE,
            0.0,
            {"prefill_queue": 0.003, "prefill": 0.03, "kv_fetch": 0.0, "first_decode_step": 0.0},
            "prefill",
        ),
    ],
    ids=["nothing", "slow hand-off", "queue and prefill", "slow pull", "computed by decode"],
)
def test_phases_are_as_fine_as_the_server_reports_them(
    alone: Resimulation,
    reported: dict[str, float],
    earlier_s: float,
    measured_s: dict[str, float],
    explains: str,
) -> None:
    """They add up to the E2E latency, and the phase with the largest error is named."""
    samples = [replace(s, phases_s=reported, due_s=s.due_s - earlier_s) for s in as_simulated()]
    phases = compare_phases(alone, samples)

    found = {row.name: row for row in phases.rows}
    assert {name: found[name].measured_s for name in measured_s} == pytest.approx(measured_s)
    assert sum(row.measured_s for row in phases.rows) == pytest.approx(
        sum(s.e2e_s for s in samples) / len(samples)
    )
    worst = max(found.values(), key=lambda row: abs(row.predicted_s - row.measured_s))
    assert worst.name == phases.explains == explains
    total_s = sum(abs(row.predicted_s - row.measured_s) for row in found.values())
    assert phases.share_fraction * total_s == pytest.approx(abs(worst.difference_s))
    assert phases.count == len(samples)


def test_phases_are_of_the_requests_that_report_them(alone: Resimulation) -> None:
    """Requests without phases are left out; without a simulated request nothing is compared."""
    silent = [replace(each, phases_s={}) for each in as_simulated()]
    some = compare_phases(alone, [*as_simulated()[:20], *silent[20:]])
    assert some is not None
    assert some.count == 20
    assert compare_phases(alone, [make_sample(index=99)]) is None


def test_without_a_plan_that_can_be_simulated(tmp_path: Path, plan_file: Path) -> None:
    """What the simulator refuses is one line, and nothing is made up."""
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(MiniclusterError, match=r"plan\.json"):
        simulated(tmp_path / "plan.json", as_simulated())
    with pytest.raises(MiniclusterError, match="no request"):
        simulated(plan_file, [make_sample(outcome="shed")])


def judged_in(folder: Path, run: Run, plan: Path) -> Verdict:
    """Judge *run* as `loadtest run` leaves it in *folder*."""
    prepare(folder, run.job, run.schedule, plan)
    leave(folder, run.samples)
    verdict = judge_run(folder, {"ttft": 0.35, "tpot": 0.05})  # its hand-off is not as simulated
    assert (folder / "verdict.json").read_text() == as_json(verdict)
    return verdict


def test_a_run_is_judged_with_its_resimulation(plan_file: Path, tmp_path: Path) -> None:
    """
    A run as the model predicts agrees with its resimulation, whatever the plan predicted.

    A request that was turned away waits in no simulated queue, and the verdict says how many.
    """
    samples = as_simulated(apart_s=0.16)
    away = [
        make_sample(60 + k, s.due_s - 0.01, ttft_s=None, outcome="shed", detail="429: full")
        for k, s in enumerate(samples[1::3])
    ]
    verdict = judged_in(tmp_path / "run", make_run([*samples, *away]), plan_file)
    alone = judged_in(tmp_path / "alone", make_run(samples), plan_file)

    assert alone.comparison.source == "resimulated"
    assert alone.comparison.held
    stall = alone.comparison.row("longest_stall", "p99")
    assert stall.predicted_s == pytest.approx(0.01, rel=0.05)
    row = alone.comparison.row("tpot", "mean")
    assert row.error_fraction == pytest.approx(0.0, abs=0.02)
    assert row.error_low is not None
    assert "Goodput against load" in (tmp_path / "alone" / "report.html").read_text()
    ours, theirs = (v.comparison.row("ttft", "p99") for v in (verdict, alone))
    assert ours.predicted_s == pytest.approx(theirs.predicted_s)
    assert any("20 of 80 requests sent (25%)" in note for note in verdict.notes)
    planned = judged(make_run([*samples, *away]))
    assert not any("turned away" in note for note in (*alone.notes, *planned.notes))


def test_a_machine_that_ran_slower_is_no_error(plan_file: Path, tmp_path: Path) -> None:
    """
    Steps that took half as long again as the plan's explain latencies that did, too.

    The verdict says both: the error as planned, and at the pace of the engines; the second one
    decides whether the prediction held. Without the engines' steps there is only the first.
    """
    slow = {"queued_prefill": 1.5 * 0.0132, "handoff": 0.015}
    samples = [
        make_sample(k, k / 1.0, ttft_s=0.0348, itl_s=0.015, phases_s=slow) for k in range(60)
    ]
    folder = tmp_path / "run"
    run = make_run(samples)
    without = judged_in(folder, run, plan_file)
    assert without.comparison.pace == {}
    assert not without.comparison.held
    write_engine_steps(
        folder / ENGINE_STEPS,
        {
            "prefill": [EngineStep(k, 1.5 * 0.0132, 1, 32, 528, 0, 0, 1) for k in range(60)],
            "decode": [EngineStep(k / 10, 0.015, 0, 0, 0, 1, 40, 0) for k in range(600)],
        },
        0.0,
    )
    verdict = judge_run(folder, {"ttft": 0.2, "tpot": 0.15})
    assert verdict.comparison.pace == pytest.approx({"prefill": 1.5, "decode": 1.5}, rel=1e-6)
    row = verdict.comparison.row("tpot", "mean")
    assert row.error_fraction == pytest.approx(1 / 1.5 - 1, abs=0.01)
    assert row.error_at_pace_fraction == pytest.approx(0, abs=0.01)
    assert verdict.comparison.held
    assert pace_text(verdict) == (
        "engine steps against those of the calibration, for the same work: prefill 50% slower, "
        "decode 50% slower"
    )
    said = prediction_text(verdict)
    assert "at the engines' pace held" in said
    assert "-33% as planned" in said
    page = (folder / "report.html").read_text()
    assert "at pace" in page
    assert "prefill 50% slower" in page


@pytest.mark.parametrize(
    ("outcome", "detail", "came_in"),
    [
        ("ok", None, True),
        ("bad_status", "500: broken", True),
        ("bad_status", "413: too long", False),
        ("shed", "429: full", False),
        ("refused", "ConnectionRefusedError", False),
    ],
)
def test_what_engines_saw(outcome: str, detail: str | None, *, came_in: bool) -> None:
    """Refused at the door or never sent: no engine had anything to do with it."""
    assert make_sample(outcome=outcome, detail=detail).turned_away is not came_in


@pytest.mark.parametrize(("requests_per_s", "good_fraction"), [(6, 1.0), (1000, 0.3)])
def test_a_growing_queue_is_predicted_like_any_other_run(
    plan_file: Path, tmp_path: Path, requests_per_s: float, good_fraction: float
) -> None:
    """
    Latencies, goodput and pools of 300 requests that come far too fast, as of a light load.

    Decode answers 8 at a time in 0.1 s: of all that come within 0.3 s, about 80 begin within 1 s.
    """
    run = make_run([make_sample(k, k / requests_per_s, ttft_s=0.05) for k in range(300)])
    window = replace(run.job.window, end_s=300 / requests_per_s)
    run = replace(run, job=replace(run.job, window=window))
    verdict = judged_in(tmp_path / "run", run, plan_file)

    predicted = verdict.throughput.predicted_good_requests_per_s
    assert predicted == pytest.approx(good_fraction * requests_per_s, rel=0.2)
    tokens = verdict.throughput.predicted_output_tokens_per_s
    assert tokens is not None
    assert 0 < tokens < 1.01 * requests_per_s * 10
    _, decode = verdict.pools
    assert 0 < decode.predicted_utilisation_fraction <= 1


def test_a_plan_of_another_model_is_refused(plan_file: Path, tmp_path: Path) -> None:
    run = make_run(as_simulated())
    with pytest.raises(InputError, match="other"):
        judged_in(tmp_path, replace(run, job=replace(run.job, model="other")), plan_file)
