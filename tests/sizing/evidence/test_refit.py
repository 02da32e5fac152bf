from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from minicluster.errors import Exit, InputError
from minicluster.plan import Plan, read_plan, to_json
from minicluster.workload.arrivals import poisson_arrivals
from minicluster.workload.samples import Sample, to_line
from minicluster.workload.schedule import ScheduledRequest, write_schedule
from sizing.catalog import find_model
from sizing.evidence.refit.evidence import check_runs
from sizing.evidence.refit.fit import fit_scales, residuals
from sizing.evidence.refit.observed import Observed, read_observed
from sizing.evidence.refit.scales import Scales, scaled
from sizing.latency.calibration import read_calibration
from sizing.simulation.outcome import simulate
from sizing.simulation.planned import deployed_system

if TYPE_CHECKING:
    from minicluster.specs.calibration import CalibrationSpec

GOLDEN = Path(__file__).parents[2] / "golden"
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
REQUEST = ScheduledRequest(index=0, due_s=0.0, input_tokens=64, output_tokens=8, in_window=True)
MICROSECOND = 1.1e-6
"""Times in samples are whole microseconds; a latency is the difference of two."""

TRUTH = Scales(prefill=1.2, decode=0.85, prefill_beside=1.5, decode_beside=1.3)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan for a small model, from a made-up calibration of it."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.json").write_text(json.dumps(SMALL))
    calibration = folder / "calibration.json"
    text = (GOLDEN / "laptop.calibration.json").read_text(encoding="utf-8")
    calibration.write_text(text.replace("HASH", find_model(str(folder)).config_hash))
    options = ["--set", f"model.id={folder}", "--calibration", calibration]
    done = sizing("plan", "laptop", *options, "-o", folder / "plan.json")
    assert done.returncode == Exit.DONE, done.stderr
    return folder / "plan.json"


@pytest.fixture(scope="module")
def plan(plan_file: Path) -> Plan:
    """Return that plan."""
    return read_plan(plan_file)


def run_of(
    plan: Plan, truth: Scales, *, seed: int, rate_factor: float = 1.0, num: int = 600
) -> Observed:
    """Return a run on a machine whose constants are the plan's times *truth*."""
    load = replace(plan.workload, requests_per_s=rate_factor * plan.workload.requests_per_s)
    arrivals = poisson_arrivals(load, duration_s=num / load.requests_per_s, seed=seed)
    system = deployed_system(plan.deployment, scaled(plan.step_model, truth))
    seen = simulate(system, arrivals, seed=seed + 1)
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
    runs = [run_of(plan, TRUTH, seed=1), run_of(plan, TRUTH, seed=2, rate_factor=0.6)]
    found = fit_scales(model, runs)
    other = run_of(plan, TRUTH, seed=3, rate_factor=1.2)
    rows = residuals(model, scaled(model, found), [other])
    before = {(r.metric, r.statistic): abs(r.before_fraction) for r in rows}
    after = {(r.metric, r.statistic): abs(r.after_fraction) for r in rows}

    assert after["tpot", "mean"] < 0.03 < before["tpot", "mean"]
    assert after["ttft", "mean"] < 0.08 < before["ttft", "mean"]


def test_what_explains_itself_stays(plan: Plan) -> None:
    """A run as predicted moves no factor further than chance does."""
    model = plan.step_model
    found = fit_scales(model, [run_of(plan, Scales(), seed=4)])

    assert found.logs == pytest.approx(np.zeros(5), abs=0.08)


def test_what_a_run_cannot_tell_stays_at_the_prior(plan: Plan) -> None:
    """At a load that never has two requests in flight, interference keeps its factor."""
    model = plan.step_model
    found = fit_scales(model, [run_of(plan, TRUTH, seed=5, rate_factor=0.02, num=200)])

    assert found.decode_beside == pytest.approx(1.0, abs=0.1)


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


def test_the_warm_up_is_the_one_that_the_verdict_cut(plan: Plan, tmp_path: Path) -> None:
    """What counts for the verdict counts for the refit, and nothing else."""
    run = run_of(plan, Scales(), seed=6, num=200)
    path = written(plan, run, tmp_path / "run")
    without = read_observed(path, None)
    start_s = round(float(run.arrivals.due_s[100]), 6)  # as samples have it
    verdict = path.parent / "verdict.json"
    verdict.write_text(
        json.dumps({"verdict": "met", "reasons": [], "window": {"start_s": start_s}})
    )

    found = read_observed(path, None)

    assert (without.counts == run.counts).all()
    assert (found.counts == (run.counts & (run.arrivals.due_s.round(6) >= start_s))).all()
    verdict.write_text("{}")
    with pytest.raises(InputError, match=r"window\.start_s"):
        read_observed(path, None)


def judged(samples: Path, verdict: str) -> Path:
    """Write *verdict* beside *samples*."""
    found = {"verdict": verdict, "reasons": [], "window": {"start_s": 0.0}}
    (samples.parent / "verdict.json").write_text(json.dumps(found))
    return samples


def shed(samples: Path, every: int) -> Path:
    """Have the door turn away every so-manieth request of *samples*."""
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    for row in rows[::every]:
        row |= {"outcome": "shed", "detail": "429: full", "chunk_s": [], "chunk_tokens": []}
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return samples


def test_requests_turned_away_are_not_simulated(plan: Plan, tmp_path: Path) -> None:
    """Who was shed is no arrival of an engine; what was answered stays as it was."""
    run = run_of(plan, Scales(), seed=6, num=200)
    path = shed(written(plan, run, tmp_path / "run"), every=10)
    found = read_observed(path, None)

    left = np.delete(np.arange(len(run.arrivals)), np.s_[::10])
    assert found.turned_away == len(run.arrivals) - len(left)
    assert found.arrivals.input_tokens.tolist() == run.arrivals.input_tokens[left].tolist()
    assert found.ttft_s == pytest.approx(run.ttft_s[left], abs=MICROSECOND)


def test_many_turned_away_are_refused(plan: Plan, tmp_path: Path) -> None:
    """One in ten is left out, and said; of one in two nothing can be learned."""
    run = run_of(plan, Scales(), seed=6, num=300)
    few = calibrate(
        "--from", shed(written(plan, run, tmp_path), every=10), "-o", tmp_path / "out.json"
    )
    many = calibrate("--from", shed(tmp_path / "samples.jsonl", every=2), "-o", tmp_path / "x.json")

    assert few.returncode == Exit.DONE, few.stderr
    assert "rejected before they reached an engine" in few.stderr
    assert many.returncode == Exit.BAD_INPUT
    assert "expected at most 20%" in many.stderr


@pytest.mark.parametrize("verdict", ["invalid", "interrupted", "failed"])
def test_a_run_that_proves_nothing_is_not_fitted(plan: Plan, verdict: str, tmp_path: Path) -> None:
    """Its verdict is named, and the way out: it may be compared with."""
    run = run_of(plan, Scales(), seed=6, num=200)
    bad = judged(written(plan, run, tmp_path / "bad"), verdict)
    good = judged(written(plan, run, tmp_path / "good"), "missed")

    with pytest.raises(InputError, match=rf"bad.*'{verdict}'.*--hold-out"):
        check_runs([read_observed(good, None), read_observed(bad, None)], [])
    check_runs([read_observed(good, None)], [read_observed(bad, None)])


def test_one_fit_has_one_beginning(plan: Plan) -> None:
    """Runs of one calibration are fitted together, of one machine, engine and model compared."""
    run = run_of(plan, Scales(), seed=6, num=200)
    base = plan.inputs.calibration
    assert base
    refitted = planned_with(run, replace(base, name="refitted", num_rows=9))
    elsewhere = planned_with(run, replace(base, key=replace(base.key, cores=999)))

    assert check_runs([run, run], [refitted]) == base
    with pytest.raises(InputError, match="refitted of"):
        check_runs([run, refitted], [])
    for fitted, held_out in (([run, elsewhere], []), ([run], [elsewhere])):
        with pytest.raises(InputError, match=r"key\.cores is 999"):
            check_runs(fitted, held_out)
    with pytest.raises(InputError, match="--calibration"):
        check_runs([run], [planned_with(run, None)])


def planned_with(run: Observed, calibration: CalibrationSpec | None) -> Observed:
    """Return *run* as if its plan came from *calibration*."""
    return replace(run, calibration=calibration)


def test_shared_blocks_are_those_of_the_schedule(plan: Plan, tmp_path: Path) -> None:
    """A run of a trace is simulated with the prefix hits that it had."""
    path = written(plan, run_of(plan, Scales(), seed=7, num=200), tmp_path / "run")
    schedule = path.parent / "schedule.jsonl"
    assert read_observed(path, None).arrivals.content is None
    write_schedule([REQUEST, replace(REQUEST, index=1, content=(4, 5))], schedule)

    found = read_observed(path, None).arrivals.content

    assert found is not None
    assert found[:3] == ((), (4, 5), ())
    schedule.write_text("[]\n")
    with pytest.raises(InputError, match=r"schedule\.jsonl"):
        read_observed(path, None)


def test_prefix_and_conversations_are_those_of_the_schedule(plan: Plan, tmp_path: Path) -> None:
    """What prompts share is simulated as it was sent."""
    path = written(plan, run_of(plan, Scales(), seed=7, num=200), tmp_path / "run")
    assert read_observed(path, None).arrivals.prefix_tokens is None
    rows = [replace(REQUEST, index=1, prefix_tokens=32, session=5), REQUEST]
    write_schedule(rows, path.parent / "schedule.jsonl")

    found = read_observed(path, None).arrivals

    assert found.prefix_tokens is not None
    assert found.session is not None
    assert found.prefix_tokens[:3].tolist() == [0, 32, 0]
    assert found.session[:3].tolist() == [-1, 5, -1]


def sizing(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `sizing`."""
    command = [sys.executable, "-c", "from sizing.cli import main; main()"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def calibrate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `sizing calibrate`."""
    return sizing("calibrate", *arguments)


def test_samples_are_read_as_they_were_written(plan: Plan, tmp_path: Path) -> None:
    """Latencies and phases come out as the definitions of docs/model.md have them."""
    run = run_of(plan, Scales(), seed=6, num=200)
    again = read_observed(written(plan, run, tmp_path), None)

    assert again.ttft_s == pytest.approx(run.ttft_s, abs=MICROSECOND)
    assert again.tpot_s == pytest.approx(run.tpot_s, abs=MICROSECOND, nan_ok=True)
    assert again.phases_s["queued_prefill"] == pytest.approx(
        run.phases_s["queued_prefill"], abs=MICROSECOND
    )
    assert (again.counts == run.counts).all()


def test_command_writes_a_calibration(plan: Plan, tmp_path: Path) -> None:
    """From a run comes a calibration that `sizing plan` reads, and the errors on another run."""
    first = written(plan, run_of(plan, TRUTH, seed=7, num=300), tmp_path / "first")
    second = judged(
        written(plan, run_of(plan, TRUTH, seed=8, num=300), tmp_path / "second"), "invalid"
    )
    out = tmp_path / "again.json"
    done = calibrate("--from", first, "--hold-out", second, "-o", out, "--json")

    assert done.returncode == Exit.DONE, done.stderr
    before = plan.inputs.calibration
    assert before
    fitted, told = read_calibration(out), json.loads(done.stdout)
    assert fitted.key == before.key
    assert fitted.decode.base_s == pytest.approx(before.decode.base_s * told["scales"]["decode"])
    means = [r for r in told["held_out"] if (r["metric"], r["statistic"]) == ("tpot", "mean")]
    assert abs(means[0]["after_fraction"]) < abs(means[0]["before_fraction"])
    assert "its verdict is invalid" in done.stderr
    assert json.loads(out.with_suffix(".residuals.json").read_text()) == told


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda path: path.unlink(), "samples written by `loadtest run`"),
        (lambda path: path.write_text(""), "an empty file"),
        (lambda path: path.write_text("{}\n"), "samples.jsonl:1"),
        (lambda path: path.write_bytes(b"\xff\xfe\n"), "binary data"),
        (lambda path: (path.parent / "plan.json").unlink(), "plan.json"),
        (lambda path: (path.parent / "run.json").write_text('{"model": "other"}'), "'other'"),
        (lambda path: path.write_text(path.read_text().replace('"ok"', '"cut"')), "at least 50"),
    ],
)
def test_bad_samples_are_refused(plan: Plan, tmp_path: Path, break_it: object, says: str) -> None:
    """What is no run gets one line: place, value, expectation; exit 2."""
    path = written(plan, run_of(plan, Scales(), seed=9, num=100), tmp_path)
    break_it(path)  # type: ignore[operator]
    done = calibrate("--from", path, "-o", tmp_path / "out.json")

    assert done.returncode == Exit.BAD_INPUT, done.stderr
    assert says in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_options_that_do_not_go_together() -> None:
    """Steps or samples, not both, and not neither."""
    assert calibrate("-o", "x.json").returncode == Exit.BAD_INPUT
    assert calibrate("laptop", "--from", "x", "-o", "x.json").returncode == Exit.BAD_INPUT
    assert calibrate("laptop", "--hold-out", "x", "-o", "x.json").returncode == Exit.BAD_INPUT
