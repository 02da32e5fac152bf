"""The prediction made again, phase by phase; and what CI systems and other runs get of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from loadtest.client.request import reported_phases
from loadtest.report.judge import judge_run
from loadtest.report.junit import to_junit
from loadtest.run.client_health import Client, write_client
from loadtest.run.folder import Run, prepare
from loadtest.studies.compare import compare_runs
from loadtest.verdict.phases import compare_phases
from loadtest.verdict.prediction import TOLERANCE
from loadtest.verdict.resimulation import Resimulation, reached_engine, resimulate
from loadtest.verdict.verdict import Verdict, conclude
from minicluster.errors import InputError, MiniclusterError
from minicluster.plan import to_json
from minicluster.workload.samples import Sample, to_line
from minicluster.workload.schedule import ScheduledRequest
from tests.loadtest.made import make_plan, make_run, make_sample


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """Return a plan whose prefill takes 10 ms + 0.1 ms a token, and a decode step 10 ms."""
    path = tmp_path / "given.json"
    path.write_text(to_json(make_plan()))
    return path


def simulated(plan: Path, samples: Sequence[Sample], **shared: Any) -> Resimulation:  # noqa: ANN401
    """Simulate *samples*, whose prompts have *shared*."""
    schedule = [
        ScheduledRequest(
            index=s.index,
            due_s=0.0,
            input_tokens=s.asked_input_tokens,
            output_tokens=s.asked_output_tokens,
            in_window=True,
            **shared,
        )
        for s in samples
    ]
    return resimulate(plan, samples, schedule)


def as_simulated(*, apart_s: float = 1.0) -> list[Sample]:
    """Return requests that never meet one another: prefill 13.2 ms, first step, nine more."""
    told = {"queued_prefill": 0.0132, "handoff": 0.02}
    return [
        make_sample(k, k * apart_s, ttft_s=0.0332, itl_s=0.01, phases_s=told) for k in range(60)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Resimulation:
    """Simulate requests that never meet, given in any order."""
    path = tmp_path_factory.mktemp("alone") / "plan.json"
    path.write_text(to_json(make_plan()))
    return simulated(path, list(reversed(as_simulated())))


def test_requests_alone_take_what_the_formulas_say(alone: Resimulation) -> None:
    """A request that meets no other takes what the step model says, in the run's order."""
    found = alone
    assert sorted(found.requests) == list(range(60))
    one = found.requests[7]
    assert one.phases_s["prefill"] == pytest.approx(0.01 + 32e-4)
    assert one.phases_s["prefill_queue"] == pytest.approx(0.0)
    assert one.tpot_s == pytest.approx(0.01)
    assert sum(one.phases_s.values()) == pytest.approx(one.ttft_s)
    assert found.itl["mean"] == pytest.approx(0.01)


def test_a_shared_prefix_is_not_computed(plan_file: Path) -> None:
    """Of prompts that share two blocks with all others only the third one takes prefill's time."""
    samples = [replace(s, asked_input_tokens=96) for s in as_simulated()]
    found = simulated(plan_file, samples, prefix_tokens=64)
    whole = simulated(plan_file, samples)

    assert {round(r.phases_s["prefill"], 6) for r in found.requests.values()} == {0.01 + 32e-4}
    assert {round(r.phases_s["prefill"], 6) for r in whole.requests.values()} == {0.01 + 96e-4}


def test_what_was_said_before_is_not_computed(plan_file: Path) -> None:
    """The second turn of a conversation computes what is new in it, whatever its index."""
    turns = [
        make_sample(4, 0.0, asked_input_tokens=64),
        make_sample(9, 5.0, asked_input_tokens=160),
    ]
    found = simulated(plan_file, turns, session=7)
    apart = simulated(plan_file, turns)

    assert found.requests[9].phases_s["prefill"] == pytest.approx(0.01 + 96e-4)
    assert apart.requests[9].phases_s["prefill"] == pytest.approx(0.01 + 160e-4)


def test_chance_in_the_arrivals_is_on_both_sides(plan_file: Path) -> None:
    """Requests that come in a burst wait in the simulation as they waited in the run."""
    burst = [make_sample(k, 0.001 * (k % 30) + 5 * (k // 30)) for k in range(60)]
    waits = [
        each.phases_s["prefill_queue"] for each in simulated(plan_file, burst).requests.values()
    ]

    assert max(waits) > 0.05
    assert min(waits) == pytest.approx(0.0)


PULLED = reported_phases(
    {"prefill_queue": 0.0, "prefill": 0.0132, "handoff": 0.12},
    {"queue_time": 0.108, "time_to_first_token": 0.01},
)
COMPUTED_BY_DECODE = reported_phases(
    {"queued_prefill": 0.033, "kv_fetch": 0.0, "first_decode_step": 0.0},
    {"queue_time": 0.003, "time_to_first_token": 0.03},
)


@pytest.mark.parametrize(
    ("reported", "earlier_s", "measured_s", "explains"),
    [
        ({}, 0.0, {"ttft": 0.0332}, "ttft"),
        ({"queued_prefill": 0.0132, "handoff": 0.5}, 0.48, {"handoff": 0.5}, "handoff"),
        (
            {"prefill_queue": 0.0, "prefill": 0.0132, "handoff": 0.02},
            0.0,
            {"prefill_queue": 0.0, "prefill": 0.0132, "handoff": 0.02},
            "handoff",
        ),
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

    assert phases
    found = {row.name: row for row in phases.rows}
    assert {name: found[name].measured_s for name in measured_s} == pytest.approx(measured_s)
    assert sum(row.measured_s for row in phases.rows) == pytest.approx(
        sum(s.e2e_s for s in samples) / len(samples)
    )
    assert max(found, key=lambda name: abs(found[name].difference_s)) == phases.explains
    assert phases.explains == explains


def test_without_a_plan_that_can_be_simulated(tmp_path: Path) -> None:
    """What the simulator refuses is one line, and nothing is made up."""
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(MiniclusterError):
        simulated(tmp_path / "plan.json", as_simulated())
    with pytest.raises(MiniclusterError):
        simulated(tmp_path / "plan.json", [])


def kept(run: Run, plan: Path, folder: Path) -> Path:
    """Write *run* as `loadtest run` leaves it."""
    prepare(folder, run.job, run.schedule, plan)
    client: Client = run.client
    write_client(client, folder / "client.json")
    (folder / "samples.jsonl").write_text("".join(to_line(s) + "\n" for s in run.samples))
    return folder


def test_a_run_is_judged_with_its_resimulation(plan_file: Path, tmp_path: Path) -> None:
    """A run as the model predicts agrees with its resimulation, whatever the plan predicted."""
    run = make_run(as_simulated(apart_s=0.16))
    verdict = judge_run(
        kept(run, plan_file, tmp_path / "run"),
        TOLERANCE,
        junit=tmp_path / "junit.xml",
    )

    assert verdict.comparison
    assert verdict.comparison.source == "resimulated"
    assert verdict.comparison.held
    stall = verdict.comparison.row("longest_stall", "p99")
    assert stall
    assert stall.predicted_s == pytest.approx(0.01, rel=0.05)
    row = verdict.comparison.row("tpot", "mean")
    assert row
    assert row.error_fraction == pytest.approx(0.0, abs=0.02)
    assert row.error_low is not None
    assert "Goodput against load" in (tmp_path / "run" / "report.html").read_text()
    assert ET.parse(tmp_path / "junit.xml").getroot().get("errors") == "2"  # noqa: S314


def test_requests_turned_away_are_not_simulated(plan_file: Path, tmp_path: Path) -> None:
    """A shed request waits in no simulated queue, and the verdict says how many there were."""
    samples = as_simulated(apart_s=0.16)
    away = [
        make_sample(60 + k, s.due_s - 0.01, ttft_s=None, outcome="shed", detail="429: full")
        for k, s in enumerate(samples[1::3])
    ]
    run = make_run([*samples, *away])
    verdict = judge_run(kept(run, plan_file, tmp_path / "run"), TOLERANCE)
    alone = judge_run(kept(make_run(samples), plan_file, tmp_path / "alone"), TOLERANCE)

    assert verdict.comparison
    assert alone.comparison
    ours, theirs = (v.comparison.row("ttft", "p99") for v in (verdict, alone))
    assert ours
    assert theirs
    assert ours.predicted_s == pytest.approx(theirs.predicted_s)
    assert any("20 of 80 requests sent (25%)" in note for note in verdict.notes)
    assert not any("turned away" in note for note in alone.notes)


@pytest.mark.parametrize(
    ("outcome", "detail", "came_in"),
    [
        ("ok", None, True),
        ("timeout", "no end after 30 s", True),
        ("bad_status", "500: broken", True),
        ("bad_status", "413: too long", False),
        ("shed", "429: full", False),
        ("refused", "ConnectionRefusedError", False),
        ("client", "OSError", False),
    ],
)
def test_what_engines_saw(outcome: str, detail: str | None, *, came_in: bool) -> None:
    """Refused at the door or never sent: no engine had anything to do with it."""
    assert bool(reached_engine([make_sample(outcome=outcome, detail=detail)])) is came_in


@pytest.mark.parametrize(("requests_per_s", "good_fraction"), [(6, 1.0), (1000, 0.3)])
def test_a_growing_queue_is_predicted_like_any_other_run(
    plan_file: Path,
    tmp_path: Path,
    requests_per_s: float,
    good_fraction: float,
) -> None:
    """
    Latencies, goodput and pools of 300 requests that come far too fast, as of a light load.

    Decode answers 8 at a time in 0.1 s: of all that come within 0.3 s, about 80 begin within 1 s.
    """
    window_s = 300 / requests_per_s
    run = make_run([make_sample(k, k / requests_per_s, ttft_s=0.05) for k in range(300)])
    window = replace(run.job.window, end_s=window_s)
    run = replace(run, job=replace(run.job, window=window))
    verdict = judge_run(kept(run, plan_file, tmp_path / "run"), TOLERANCE)

    assert verdict.comparison
    assert verdict.comparison.source == "resimulated"
    predicted = verdict.throughput.predicted_good_requests_per_s
    assert predicted == pytest.approx(good_fraction * requests_per_s, rel=0.2)
    _, decode = verdict.pools
    assert decode.predicted_utilisation_fraction is not None
    assert 0 < decode.predicted_utilisation_fraction <= 1


def test_a_plan_of_another_model_is_refused(plan_file: Path, tmp_path: Path) -> None:
    run = make_run(as_simulated())
    folder = kept(replace(run, job=replace(run.job, model="other")), plan_file, tmp_path / "run")
    with pytest.raises(InputError, match="other"):
        judge_run(folder, TOLERANCE)


def judged(run: Run) -> Verdict:
    return conclude(run, TOLERANCE, require_prediction=False)


def cases(verdict: Verdict, *, required: bool = False) -> dict[str, str]:
    """Return what became of each JUnit case."""
    suite = ET.fromstring(to_junit(verdict, require_prediction=required))  # noqa: S314
    found = {}
    for case in suite.findall("testcase"):
        marks = [child.tag for child in case if child.tag != "system-out"]
        found[str(case.get("name"))] = marks[0] if marks else "passed"
    return found


def test_junit() -> None:
    """Kept limits pass, missed ones fail, what was not proven is an error."""
    good = [make_sample(k, k / 480) for k in range(4800)]
    slow = [make_sample(k, k / 480, ttft_s=0.1 if k % 20 else 1.5) for k in range(4800)]
    limit = "TTFT p99 < 1000 ms"

    assert set(cases(judged(make_run(good))).values()) == {"passed"}
    assert cases(judged(make_run(slow)))[limit] == "failure"
    assert cases(judged(make_run(good[:100])))[limit] == "error"
    assert cases(judged(make_run(good, cpu_fraction=0.99)))["the run is valid"] == "error"
    other = [make_sample(k, k / 480, itl_s=0.04) for k in range(4800)]
    assert cases(judged(make_run(other)))["the prediction held"] == "skipped"
    assert cases(judged(make_run(other)), required=True)["the prediction held"] == "failure"


def test_junit_of_a_run_that_did_not_settle() -> None:
    """A build is not green because every limit was kept in a run that proves nothing."""
    verdict = replace(
        judged(make_run([make_sample(k, k / 480) for k in range(4800)])),
        verdict="inconclusive",
        reasons=("latencies had not settled in the window; a longer one is needed",),
    )
    found = cases(verdict)

    assert found["the run is valid"] == "error"
    assert "failure" not in found.values()


def test_two_runs() -> None:
    """A change of 5 % shows between runs of one schedule; another schedule is said to be one."""
    rng = np.random.default_rng(0)
    drawn = rng.exponential(0.1, 1000).tolist()
    first = make_run([make_sample(k, k / 100, ttft_s=v) for k, v in enumerate(drawn)])
    second = make_run([make_sample(k, k / 100, ttft_s=1.05 * v) for k, v in enumerate(drawn)])
    found = compare_runs(first, second, ("a", "b"))
    change = next(c for c in found.changes if (c.metric, c.statistic) == ("ttft", "mean"))
    other = make_run([make_sample(k, k / 50, ttft_s=v) for k, v in enumerate(drawn[:400])])

    assert found.paired
    assert change.significant
    assert change.low_s > 0
    assert not any(c.significant for c in found.changes if c.metric == "tpot")
    assert not compare_runs(first, other, ("a", "b")).paired
    with pytest.raises(InputError):
        compare_runs(
            first, make_run([replace(s, outcome="cut") for s in other.samples]), ("a", "b")
        )
