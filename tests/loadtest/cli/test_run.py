"""Runs against the mock server: what is measured and left, and how they end."""

from __future__ import annotations

import signal
import statistics
from pathlib import Path

import pytest

from minicluster.errors import Exit
from minicluster.specs.slo import ClassSlo, SloSpec
from minicluster.specs.workload import Lengths, RequestClass, WorkloadSpec
from tests.loadtest.command import (
    FAST,
    ServerStarter,
    answered,
    loadtest,
    run,
    start_run,
    verdict_in,
)
from tests.loadtest.made import make_plan, plan_json


def test_a_run_by_the_command(start_server: ServerStarter, tmp_path: Path) -> None:
    """Every request that counts is answered and in the verdict, of which --json prints the file."""
    done = run(start_server(**FAST, tokens_per_chunk=3), tmp_path, "--json")
    samples = answered(tmp_path)

    assert done.stdout == (tmp_path / "verdict.json").read_text()
    assert done.returncode == verdict_in(tmp_path)["exit_code"]
    assert len(samples) == 100
    assert 0 <= statistics.median(s.send_s - s.due_s for s in samples) < 1
    assert {s.chunk_tokens for s in samples} == {(3, 3, 3, 1)}
    assert any("carried several tokens" in note for note in verdict_in(tmp_path)["notes"])
    assert verdict_in(tmp_path)["outcomes"] == {"ok": 100}


def test_planned_run_compares_with_the_prediction(
    start_server: ServerStarter, tmp_path: Path
) -> None:
    """With a plan the table has all three columns; a prediction far off fails where required."""
    host = start_server(ttft_s=0.05, itl_s=0.02)
    plan = plan_json(make_plan(ttft_s=5.0, slo=SloSpec(ttft_s=30.0, tpot_s=5.0)), tmp_path)
    out = tmp_path / "out"
    options = ["--host", host, "-o", out, "--warmup", "0.3", "--requests", "30"]
    done = loadtest("run", plan, *options)
    again = loadtest("report", out, "--require-prediction", "--json")

    # 30 requests prove no p99, on a machine of any pace.
    assert done.returncode == Exit.INCONCLUSIVE, done.stderr
    assert "predicted" in done.stdout
    assert again.stdout == (out / "verdict.json").read_text()
    assert not verdict_in(out)["comparison"]["held"]
    assert [pool["role"] for pool in verdict_in(out)["pools"]] == ["prefill", "decode"]
    assert (out / "report.html").read_text().count('class="chart"') == 5


def test_a_plan_of_classes_offers_its_mix(start_server: ServerStarter, tmp_path: Path) -> None:
    """Every class is sent, simulated and judged by its own limits."""
    mix = tuple(
        RequestClass(
            name=name,
            requests_per_s=rate,
            input_tokens=Lengths.fixed(16 * output),
            output_tokens=Lengths.fixed(output),
            slo=ClassSlo(ttft_s=ttft_s),
        )
        for name, rate, output, ttft_s in (("short", 30.0, 4, 9.0), ("long", 10.0, 12, 20.0))
    )
    load = WorkloadSpec(requests_per_s=40.0, classes=mix)
    plan = make_plan().under(workload=load, slo=SloSpec(tpot_s=5.0, e2e_s=30.0))
    out = tmp_path / "out"
    options = ["--host", start_server(**FAST), "-o", out, "--warmup", "0.3", "--requests", "60"]
    done = loadtest("run", plan_json(plan, tmp_path), *options)
    found = verdict_in(out)

    assert done.returncode == Exit.INCONCLUSIVE, done.stderr
    assert [each["of"] for each in found["slo"]] == ["short"] * 3 + ["long"] * 3
    assert [each["limit_s"] for each in found["slo"] if each["metric"] == "ttft"] == [9.0, 20.0]
    assert sum(each["num"] for each in found["slo"] if each["metric"] == "e2e") == 60
    assert found["comparison"]["source"] == "resimulated"
    assert {s.asked_input_tokens for s in answered(out)} == {64, 192}
    assert "long E2E p99" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_there_is(
    start_server: ServerStarter, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C and `kill` end the client too, and leave verdict and report of the part: exit 130."""
    process = start_run(start_server(**FAST), tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)

    assert process.returncode == Exit.INTERRUPTED, err
    assert "INTERRUPTED" in out
    assert verdict_in(tmp_path)["verdict"] == "interrupted"
    assert (tmp_path / "report.html").exists()


def test_server_that_dies(start_server: ServerStarter, tmp_path: Path) -> None:
    """A server that dies mid-run ends the run, with the samples so far: exit 5."""
    done = run(start_server(**FAST, die_after_s=1.0), tmp_path, "--duration", "60")

    assert done.returncode == Exit.TARGET_FAILED, done.stderr
    assert "stopped answering" in done.stdout
    assert answered(tmp_path)
    assert verdict_in(tmp_path)["metadata"]["wall_s"] < 60


def test_a_model_that_is_not_served(start_server: ServerStarter, tmp_path: Path) -> None:
    """Of a plan or an option, it is refused, both models named: exit 2."""
    host, out = start_server(model="llama"), tmp_path / "out"
    plan = plan_json(make_plan(), tmp_path)
    for done in (
        loadtest("run", plan, "--host", host, "-o", out),
        run(host, out, "--model", "fake"),
    ):
        assert done.returncode == Exit.BAD_INPUT
        assert "fake" in done.stderr
        assert "llama" in done.stderr
        assert not out.exists()


def test_nothing_listens(deaf_port: int, tmp_path: Path) -> None:
    """No server: one line with the address and the way out, nothing written, exit 5."""
    done = run(f"http://127.0.0.1:{deaf_port}", tmp_path / "out")

    assert done.returncode == Exit.TARGET_FAILED
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{deaf_port}" in done.stderr
    assert "serving up" in done.stderr
    assert not (tmp_path / "out").exists()
