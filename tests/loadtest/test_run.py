"""Runs against the fake server: what they measure, whatever the shape of the load; how they end."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from sizing.errors import Exit
from sizing.plan import to_json
from sizing.specs.slo import SloSpec

from .command import COMMAND, FAST, PATIENT, SHORT, answered, loadtest, run, verdict_in

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import PlanMaker, ServerStarter


def test_known_timings_are_measured(start_server: ServerStarter, tmp_path: Path) -> None:
    """TTFT and TPOT come out as the server makes them; --json prints exactly verdict.json."""
    done = run(start_server(**FAST), tmp_path, "--json")
    samples = answered(tmp_path)

    assert done.returncode == Exit.DONE, done.stderr
    assert done.stdout == (tmp_path / "verdict.json").read_text()
    assert len(samples) == 100
    assert 0.05 <= statistics.median(s.ttft_s for s in samples) < 0.1
    assert 0.009 < statistics.median(s.tpot_s or 0 for s in samples) < 0.02
    assert all(s.output_tokens == 10 and s.input_tokens == s.asked_input_tokens for s in samples)


def test_merged_tokens_do_not_change_tpot(start_server: ServerStarter, tmp_path: Path) -> None:
    """Three tokens a chunk and an early empty chunk: TPOT is still per token, TTFT per content."""
    host = start_server(**FAST, tokens_per_chunk=3, early_chunk=1)
    done = run(host, tmp_path)
    samples = answered(tmp_path)

    assert done.returncode == Exit.DONE, done.stderr
    assert {s.chunk_tokens for s in samples} == {(3, 3, 3, 1)}
    assert 0.009 < statistics.median(s.tpot_s or 0 for s in samples) < 0.02
    assert statistics.median(s.ttft_s for s in samples) >= 0.07
    assert "carried several tokens" in done.stdout


def test_open_loop_stays_open(start_server: ServerStarter, tmp_path: Path) -> None:
    """While the server stalls for 2 s requests go out on schedule, and the p99 holds the stall."""
    host = start_server(**FAST, stall_at_s=1.0, stall_s=2.0)
    done = run(host, tmp_path, "--duration", "4")
    samples = answered(tmp_path)
    p99_s = verdict_in(tmp_path)["latency"]["ttft"]["p99_s"]
    sent_in_stall = [s for s in samples if s.ttft_s > 0.5 and s.send_s - s.due_s < 0.25]

    # A stall is no steady state: the verdict may say so, the p99 says what was.
    assert done.returncode in {Exit.DONE, Exit.INCONCLUSIVE}, done.stderr
    assert p99_s > 1.0
    assert len(sent_in_stall) > 60  # of about 90 scheduled in the 1.5 s


def test_planned_run_compares_with_the_prediction(
    start_server: ServerStarter, make_plan: PlanMaker, tmp_path: Path
) -> None:
    """With a plan the table has all three columns; a prediction far off fails where required."""
    host = start_server(ttft_s=0.05, itl_s=0.02)
    plan = tmp_path / "plan.json"
    plan.write_text(to_json(make_plan(ttft_s=5.0, slo=SloSpec(ttft_s=30.0, tpot_s=5.0))))
    out = tmp_path / "out"
    options = ["--host", host, "-o", out, "--warmup", "0.3", "--duration", "2"]
    done = loadtest("run", plan, *options)
    again = loadtest("report", out, "--require-prediction", "--json")

    # 80 requests at p99 prove nothing on their own, and the command says what they lack.
    assert done.returncode == Exit.INCONCLUSIVE, done.stderr
    assert "minutes more" in done.stdout.replace("\n", " ")
    assert "predicted" in done.stdout
    assert again.stdout == (out / "verdict.json").read_text()
    assert not verdict_in(out)["comparison"]["held"]
    assert [pool["role"] for pool in verdict_in(out)["pools"]] == ["prefill", "decode"]
    assert (out / "report.html").read_text().count("<svg") == 5


def test_client_that_cannot_keep_up(start_server: ServerStarter, tmp_path: Path) -> None:
    """A load that the client cannot make proves nothing, and the verdict says why: exit 4."""
    host = start_server(ttft_s=0.01, itl_s=0.001)
    done = run(host, tmp_path, "--duration", "0.5", "--slo", "ttft=0.5", rate=6000)

    assert done.returncode == Exit.INCONCLUSIVE, done.stdout + done.stderr
    assert "not fit" in done.stdout
    assert answered(tmp_path)


@pytest.mark.parametrize(
    "shape",
    [
        ["--arrivals", "gamma", "--gap-cv", "2"],
        ["--users", "5"],
        ["--turns", "2", "--prefix-tokens", "8"],
        ["--turns", "2", "--vocab-size", "8"],
        ["--stages", "40x1,40-80x1"],
        ["--processes", "2"],
    ],
    ids=" ".join,
)
def test_every_shape_has_a_verdict(
    start_server: ServerStarter, tmp_path: Path, shape: list[str]
) -> None:
    """However requests come, the run ends with a verdict on the requests that count."""
    host = start_server(**FAST)
    load = ["--rate", "60"] if shape[0] not in {"--users", "--stages"} else []
    extent = [] if shape[0] == "--stages" else ["--requests", "60"]
    warmup = [] if shape[0] == "--users" else ["--warmup", "0.3"]
    lengths = ["--input-tokens", "16-64", "--output-tokens", "10"]
    options = [*load, *extent, *warmup, *lengths, *shape, "--slo", PATIENT]
    done = loadtest("run", "--host", host, *options, "-o", tmp_path)

    assert done.returncode in {Exit.DONE, Exit.INCONCLUSIVE}, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert len(answered(tmp_path)) >= 60
    assert sum(verdict_in(tmp_path)["outcomes"].values()) >= 60


def test_unanswered_requests_of_a_trace(start_server: ServerStarter, tmp_path: Path) -> None:
    """A trace with requests without an answer is sent without them, and the command says so."""
    trace, header = tmp_path / "burst.csv", "Timestamp,Model,Request tokens,Response tokens\n"
    lines = [f"{k * 0.05},ChatGPT,20,{5 if k % 4 else 0}\n" for k in range(1, 21)]
    trace.write_text(header + "".join(lines))
    options = ["--host", start_server(**FAST), "--slo", PATIENT, "--warmup", "0"]
    done = loadtest("run", *options, "--trace", trace, "--skip-unanswered", "-o", tmp_path)

    assert done.returncode in {Exit.DONE, Exit.INCONCLUSIVE}, done.stdout + done.stderr
    assert "left out 5 requests without an answer" in done.stderr
    assert len(answered(tmp_path)) == 15


def start_run(host: str, folder: Path) -> subprocess.Popen[str]:
    """Start a long run and wait until the first answers are there."""
    extent = ["--duration", "300", "--slo", PATIENT, "-o", str(folder)]
    command = [*COMMAND, "run", "--host", host, "--rate", "40", *SHORT, *extent]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (folder / "samples.jsonl").exists() and len(answered(folder)) > 10)
    return process


def wait_for(condition: Any) -> None:  # noqa: ANN401
    """Wait for *condition*, at most a minute."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


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


def test_client_ends_with_its_parent(start_server: ServerStarter, tmp_path: Path) -> None:
    """Kill the command hard, and the load stops by itself."""
    process = start_run(start_server(**FAST), tmp_path)
    process.kill()
    process.communicate()

    wait_for((tmp_path / "client.json").exists)
    assert json.loads((tmp_path / "client.json").read_text())["stop"] == "orphaned"


def test_importing_the_command_patches_nothing() -> None:
    """Locust and gevent stay in the client process."""
    code = (
        "import loadtest.cli, loadtest.selftest, sys; print({'locust', 'gevent'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
