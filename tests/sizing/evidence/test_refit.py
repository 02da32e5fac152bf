"""Constants fitted to load tests: what runs show is found, and what proves nothing is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicluster.errors import Exit, InputError
from minicluster.phases import INGRESS
from minicluster.plan import Plan, read_plan, to_json
from minicluster.workload.samples import Sample, to_line
from minicluster.workload.schedule import ScheduledRequest, write_schedule
from minicluster.workload.sources import RequestSource, drawn
from sizing.evidence.refit.fit import Scales, fit_scales, residuals, scaled, with_ingress_of
from sizing.evidence.refit.observed import Observed, check_runs, read_observed
from sizing.latency.calibration import read_calibration
from sizing.simulation.outcome import simulate_system
from sizing.simulation.planned import deployed_system
from tests.sizing.conftest import Sizing

REQUEST = ScheduledRequest(index=0, due_s=0.0, input_tokens=64, output_tokens=8, in_window=True)
MICROSECOND = 1.1e-6
"""Times in samples are whole microseconds; a latency is the difference of two."""

TRUTH = Scales(prefill=1.2, decode=0.85, prefill_beside=1.5, decode_beside=1.3)


@pytest.fixture(scope="module")
def plan(plan_of: Callable[..., Path], laptop: tuple[str, ...]) -> Plan:
    """Return a plan for a small model, from a made-up calibration of it."""
    return read_plan(plan_of(*laptop))


@pytest.fixture(scope="module")
def run(plan: Plan) -> Observed:
    """Return a run on the very machine that the plan is for."""
    return run_of(plan, Scales(), seed=6, num=200)


@pytest.fixture
def samples(plan: Plan, run: Observed, tmp_path: Path) -> Path:
    """Return the samples of that run, beside its plan."""
    return written(plan, run, tmp_path / "run")


def run_of(
    plan: Plan, truth: Scales, *, seed: int, rate_factor: float = 1.0, num: int = 600
) -> Observed:
    """Return a run on a machine whose constants are the plan's times *truth*."""
    load = replace(plan.workload, requests_per_s=rate_factor * plan.workload.requests_per_s)
    arrivals = drawn(load, RequestSource(), count=num, seed=seed)
    system = deployed_system(plan.deployment, scaled(plan.step_model, truth))
    seen = simulate_system(system, arrivals, seed=seed + 1)
    parts = seen.parts_s
    return Observed(
        name=f"run {seed}",
        deployment=plan.deployment,
        step_model=plan.step_model,
        calibration=plan.inputs.calibration,
        arrivals=arrivals,
        counts=np.arange(len(arrivals)) >= 50,
        ttft_s=seen.ttft_s,
        tpot_s=seen.tpot_s,
        phases_s={"queued_prefill": parts["prefill_queue"] + parts["prefill"]},
    )


def test_a_changed_machine_is_found(plan: Plan) -> None:
    """Constants that differ are found well enough that loads never seen are predicted."""
    model = plan.step_model
    runs = [run_of(plan, TRUTH, seed=n, rate_factor=f, num=300) for n, f in ((1, 1.0), (2, 0.6))]
    found = fit_scales(model, runs)
    other = run_of(plan, TRUTH, seed=3, rate_factor=1.2)
    rows = residuals(model, scaled(model, found), [other])
    before = {(r.metric, r.statistic): abs(r.before_fraction) for r in rows}
    after = {(r.metric, r.statistic): abs(r.after_fraction) for r in rows}

    assert after["tpot", "mean"] < 0.03 < before["tpot", "mean"]
    assert after["ttft", "mean"] < 0.08 < before["ttft", "mean"]


def written(plan: Plan, run: Observed, folder: Path) -> Path:
    """Write *run* as `loadtest run` does."""
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(to_json(plan))
    lines = []
    for k in range(len(run.arrivals)):
        due_s, tokens = float(run.arrivals.due_s[k]), int(run.arrivals.output_tokens[k])
        first_s = due_s + float(run.ttft_s[k])
        chunk_s = tuple(first_s + i * float(run.tpot_s[k]) for i in range(tokens))
        sample = Sample(
            index=k,
            in_window=bool(run.counts[k]),
            due_s=due_s,
            send_s=due_s,
            end_s=chunk_s[-1],
            asked_input_tokens=int(run.arrivals.input_tokens[k]),
            asked_output_tokens=tokens,
            input_tokens=int(run.arrivals.input_tokens[k]),
            output_tokens=tokens,
            chunk_s=chunk_s,
            chunk_tokens=(1,) * tokens,
            outcome="ok",
            phases_s={name: float(each[k]) for name, each in run.phases_s.items()},
        )
        lines.append(to_line(sample) + "\n")
    path = folder / "samples.jsonl"
    path.write_text("".join(lines))
    return path


def judged(samples: Path, verdict: str, start_s: float = 0.0) -> Path:
    found = {"verdict": verdict, "reasons": [], "window": {"start_s": start_s}}
    (samples.parent / "verdict.json").write_text(json.dumps(found))
    return samples


def shed(samples: Path, every: int) -> Path:
    """Have the endpoint reject every so-manieth request of *samples*."""
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    for row in rows[::every]:
        row |= {"outcome": "shed", "detail": "429: full", "chunk_s": [], "chunk_tokens": []}
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return samples


def test_samples_are_read_as_they_were_written(run: Observed, samples: Path) -> None:
    """Latencies and phases are as docs/model.md defines them; warm-up is what the verdict cut."""
    again = read_observed(samples, None)
    assert again.ttft_s == pytest.approx(run.ttft_s, abs=MICROSECOND)
    assert again.tpot_s == pytest.approx(run.tpot_s, abs=MICROSECOND, nan_ok=True)
    queued = run.phases_s["queued_prefill"]
    assert again.phases_s["queued_prefill"] == pytest.approx(queued, abs=MICROSECOND)
    assert (again.counts == run.counts).all()

    start_s = round(float(run.arrivals.due_s[100]), 6)  # as samples have it
    cut = read_observed(judged(samples, "met", start_s), None)
    assert (cut.counts == (run.counts & (run.arrivals.due_s.round(6) >= start_s))).all()


def test_requests_turned_away_are_not_simulated(run: Observed, samples: Path) -> None:
    """A rejected request is no arrival of an engine; what was answered stays as it was."""
    found = read_observed(shed(samples, every=10), None)

    left = np.delete(np.arange(len(run.arrivals)), np.s_[::10])
    assert found.turned_away == len(run.arrivals) - len(left)
    assert found.arrivals.input_tokens.tolist() == run.arrivals.input_tokens[left].tolist()
    assert found.ttft_s == pytest.approx(run.ttft_s[left], abs=MICROSECOND)


def test_a_run_that_proves_nothing_is_not_fitted(run: Observed) -> None:
    """Its verdict is named, and the way out: it may be compared with."""
    good = replace(run, verdict="missed", turned_away=len(run.arrivals) // 4)
    for verdict in ("invalid", "interrupted", "failed"):
        bad = replace(run, verdict=verdict)
        with pytest.raises(InputError, match=rf"'{verdict}'.*--hold-out"):
            check_runs([good, bad], [])
        check_runs([good], [bad])
    with pytest.raises(InputError, match="it has to be at most 20%"):
        check_runs([replace(good, turned_away=good.turned_away + 2)], [])


def test_one_fit_has_one_beginning(plan: Plan, run: Observed) -> None:
    """Runs of one calibration are fitted together, of one machine, engine and model compared."""
    base = plan.inputs.calibration
    assert base
    refitted = replace(run, calibration=replace(base, name="refitted", num_rows=9))
    elsewhere = replace(run, calibration=replace(base, key=replace(base.key, cores=999)))

    assert check_runs([run, run], [refitted]) == base
    with pytest.raises(InputError, match="refitted of"):
        check_runs([run, refitted], [])
    for fitted, held_out in (([run, elsewhere], []), ([run], [elsewhere])):
        with pytest.raises(InputError, match=r"key\.cores is 999"):
            check_runs(fitted, held_out)
    with pytest.raises(InputError, match="--calibration"):
        check_runs([run], [replace(run, calibration=None)])


def test_what_prompts_share_is_that_of_the_schedule(samples: Path) -> None:
    """A run of a trace or of conversations is simulated with the prefix hits that it had."""
    plain = read_observed(samples, None).arrivals
    assert (plain.content, plain.prefix_tokens, plain.session) == (None, None, None)
    second = replace(REQUEST, index=1, content=(4, 5), prefix_tokens=32, session=5)
    write_schedule([second, REQUEST], samples.parent / "schedule.jsonl")

    found = read_observed(samples, None).arrivals

    assert found.content[:3] == ((), (4, 5), ())
    assert found.prefix_tokens[:3].tolist() == [0, 32, 0]
    assert found.session[:3].tolist() == [-1, 5, -1]


def test_command_writes_a_calibration(plan: Plan, sizing: Sizing, tmp_path: Path) -> None:
    """From a run comes a calibration that `sizing plan` reads, and the errors on another run."""
    first, second = (
        written(plan, run_of(plan, TRUTH, seed=seed, num=300), tmp_path / f"{seed}")
        for seed in (7, 8)
    )
    out = tmp_path / "again.json"
    runs = ("--from", str(shed(first, every=10)), "--hold-out", str(judged(second, "invalid")))
    done = sizing("calibrate", *runs, "-o", str(out), "--json")

    assert done.code == Exit.DONE, done.err
    before = plan.inputs.calibration
    assert before
    fitted, told = read_calibration(out), json.loads(done.out)
    assert fitted.key == before.key
    assert fitted.decode.base_s == pytest.approx(before.decode.base_s * told["scales"]["decode"])
    means = [r for r in told["held_out"] if (r["metric"], r["statistic"]) == ("tpot", "mean")]
    assert abs(means[0]["after_fraction"]) < abs(means[0]["before_fraction"])
    assert "rejected before they reached an engine" in done.err
    assert "its verdict is invalid" in done.err
    assert json.loads(out.with_suffix(".residuals.json").read_text()) == told


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda path: path.unlink(), "samples written by `loadtest run`"),
        (lambda path: path.write_text(""), "an empty file"),
        (lambda path: path.write_text("{}\n"), "samples.jsonl:1"),
        (lambda path: path.write_bytes(b"\xff\xfe\n"), "not text in UTF-8"),
        (lambda path: (path.parent / "plan.json").unlink(), "plan.json"),
        (lambda path: (path.parent / "run.json").write_text('{"model": "other"}'), "'other'"),
        (lambda path: (path.parent / "verdict.json").write_text("{}"), r"window\.start_s"),
        (lambda path: (path.parent / "schedule.jsonl").write_text("[]\n"), "schedule.jsonl"),
        (lambda path: path.write_text(path.read_text().replace('"ok"', '"cut"')), "at least 50"),
    ],
)
def test_what_is_no_run_is_refused(
    samples: Path, break_it: Callable[[Path], Any], says: str
) -> None:
    break_it(samples)
    with pytest.raises(InputError, match=says):
        read_observed(samples, None)


def test_runs_are_compared_with_a_fit_to_the_others(
    plan: Plan, sizing: Sizing, tmp_path: Path
) -> None:
    """Where none is held out, each of several runs is in its turn."""
    paths = [
        str(written(plan, run_of(plan, TRUTH, seed=seed, num=120), tmp_path / f"{seed}"))
        for seed in (9, 10)
    ]
    out = tmp_path / "again.json"
    done = sizing("calibrate", "--from", paths[0], "--from", paths[1], "-o", str(out), "--json")
    found = json.loads(done.out)["held_out"]
    assert list(dict.fromkeys(row["run"] for row in found)) == paths


def test_ingress_is_a_constant_and_a_spread(run: Observed) -> None:
    """What a run took outside the engines is found again; without it the constants stay."""
    rng = np.random.default_rng(5)
    known = replace(run, phases_s={**run.phases_s, INGRESS: 0.015 + rng.exponential(0.02, 200)})
    found = with_ingress_of(run.calibration, known).path
    assert found.request_s == pytest.approx(0.015, rel=0.15)
    assert found.request_spread_s == pytest.approx(0.02, rel=0.15)
    unknown = replace(run, phases_s={**run.phases_s, INGRESS: np.full(200, np.nan)})
    assert with_ingress_of(run.calibration, unknown) == run.calibration


def test_a_spread_ingress_is_added_to_what_engines_did(plan: Plan) -> None:
    """TTFT and E2E are longer by it, TPOT and every other phase are what they were."""
    arrivals = drawn(plan.workload, RequestSource(), count=4000, seed=1)
    path = replace(plan.step_model.path, request_spread_s=0.03)
    models = (plan.step_model, replace(plan.step_model, path=path))
    usual, spread = (
        simulate_system(deployed_system(plan.deployment, model), arrivals, seed=2)
        for model in models
    )
    late_s = spread.ttft_s - usual.ttft_s
    assert late_s.min() >= 0
    assert late_s.mean() == pytest.approx(0.03, rel=0.06)
    assert np.quantile(late_s, 0.9) == pytest.approx(-0.03 * np.log(0.1), rel=0.08)
    assert spread.e2e_s - usual.e2e_s == pytest.approx(late_s)
    assert spread.parts_s[INGRESS] - usual.parts_s[INGRESS] == pytest.approx(late_s)
    assert spread.tpot_s == pytest.approx(usual.tpot_s, nan_ok=True)
    assert sum(spread.parts_s.values()) == pytest.approx(spread.ttft_s)
