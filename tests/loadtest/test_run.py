"""The command as users type it, against the fake server."""

from __future__ import annotations

import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.order import default_requests
from loadtest.samples import Sample, read_samples
from loadtest.search import enough_requests
from sizing.errors import Exit
from sizing.plan import to_json
from sizing.specs.slo import SloSpec

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import PlanMaker, ServerStarter

COMMAND = [sys.executable, "-c", "from loadtest.cli import main; main()"]
PATIENT = "ttft=30,tpot=5,percentile=p50"
"""An SLO that a busy test machine does not miss."""
SHORT = ["--output-tokens", "10", "--input-tokens", "16-64", "--warmup", "0.3", "--seed", "1"]
FAST = {"ttft_s": 0.05, "itl_s": 0.01}


def loadtest(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `loadtest` and wait for it."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def run(host: str, folder: Path, *more: str, rate: float = 60) -> subprocess.CompletedProcess[str]:
    """Load *host* for a hundred requests and an SLO that holds if answers come."""
    extent = () if "--duration" in more else ("--requests", "100")
    slo = () if "--slo" in more else ("--slo", PATIENT)
    return loadtest(
        "run", "--host", host, "--rate", str(rate), *SHORT, *extent, *slo, "-o", folder, *more
    )


def answered(folder: Path) -> list[Sample]:
    """Return the samples of the window that were answered."""
    return [s for s in read_samples(folder / "samples.jsonl") if s.ok and s.in_window]


def verdict_in(folder: Path) -> dict[str, Any]:
    """Read the verdict that a run left."""
    verdict: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    return verdict


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


@pytest.mark.parametrize(
    ("behaviour", "code", "says"),
    [
        ({"fail_every": 3}, Exit.NEGATIVE, "bad status"),
        ({"fail_every": 3, "status": 429}, Exit.NEGATIVE, "shed by the server"),
        ({"fail_every": 1}, Exit.TARGET_FAILED, "told to fail"),
        ({"cut_after_tokens": 4}, Exit.TARGET_FAILED, "cut mid-stream"),
        ({"garbage": "text"}, Exit.TARGET_FAILED, "not JSON"),
        ({"usage": 0}, Exit.TARGET_FAILED, "no usage"),
        ({"fail_every": 1, "status": 307}, Exit.TARGET_FAILED, "307"),
    ],
)
def test_bad_answers(
    start_server: ServerStarter,
    tmp_path: Path,
    behaviour: dict[str, float],
    code: Exit,
    says: str,
) -> None:
    """Every way a server can answer badly has its exit code and its name; samples are kept."""
    load = ("--slo", "ttft=30,tpot=5,percentile=p90", "--requests", "400")
    done = run(start_server(**FAST, **behaviour), tmp_path, *load, rate=100)

    assert done.returncode == code, done.stderr
    assert says in done.stdout
    assert "Traceback" not in done.stderr
    assert len(read_samples(tmp_path / "samples.jsonl")) >= 400
    assert verdict_in(tmp_path)["exit_code"] == code


def test_server_that_dies(start_server: ServerStarter, tmp_path: Path) -> None:
    """A server that dies mid-run ends the run soon, with the samples so far: exit 5."""
    done = run(start_server(**FAST, die_after_s=1.0), tmp_path, "--duration", "30")

    assert done.returncode == Exit.TARGET_FAILED, done.stderr
    assert "stopped answering" in done.stdout
    assert answered(tmp_path)
    assert verdict_in(tmp_path)["setting"]["wall_s"] < 20


@pytest.mark.parametrize("behaviour", [{"endless": 1}, {"mute_after_tokens": 4}])
def test_stream_that_never_ends(
    start_server: ServerStarter, tmp_path: Path, behaviour: dict[str, float]
) -> None:
    """Requests are given up after --timeout, whether the stream babbles or is silent: exit 5."""
    host = start_server(**FAST, **behaviour)
    done = run(host, tmp_path, "--requests", "10", "--timeout", "1")

    assert done.returncode == Exit.TARGET_FAILED, done.stderr
    assert "no end after 1 s" in done.stdout.replace("\n", " ")
    assert {s.outcome for s in read_samples(tmp_path / "samples.jsonl")} <= {
        "timeout",
        "unfinished",
    }


def test_plan_for_another_model(
    start_server: ServerStarter, make_plan: PlanMaker, tmp_path: Path
) -> None:
    """A plan for a model that the endpoint does not serve is refused, both named: exit 2."""
    plan = tmp_path / "plan.json"
    plan.write_text(to_json(make_plan()))
    done = loadtest("run", plan, "--host", start_server(model="llama"), "-o", tmp_path / "out")

    assert done.returncode == Exit.BAD_INPUT
    assert "fake" in done.stderr
    assert "llama" in done.stderr
    assert not (tmp_path / "out").exists()


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


def test_help_names_the_requests_that_are_taken() -> None:
    """What is measured by default stands in the help as it is computed."""
    for command, counted in (
        ("run", lambda name: default_requests(SloSpec(percentile=name))),
        ("search", enough_requests),
    ):
        told = CliRunner().invoke(app, [command, "--help"]).output
        assert all(f"{counted(name):,}" in told for name in ("p99", "p95", "p90"))


def test_nothing_listens(tmp_path: Path) -> None:
    """No server: one line with the address and the way out, nothing written, exit 5."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    done = run(f"http://127.0.0.1:{port}", tmp_path / "out")

    assert done.returncode == Exit.TARGET_FAILED
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "serving up" in done.stderr
    assert not (tmp_path / "out").exists()


def test_model_not_served(start_server: ServerStarter, tmp_path: Path) -> None:
    """A model that the endpoint does not serve is refused before any load, with those it has."""
    done = run(start_server(), tmp_path / "out", "--model", "llama")

    assert done.returncode == Exit.BAD_INPUT
    assert "fake" in done.stderr
    assert not (tmp_path / "out").exists()


BASE = ["--rate", "5", "--input-tokens", "10", "--output-tokens", "10", "--slo", "ttft=1"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "--rate"),
        ([*BASE, "--duration", "0"], "--duration"),
        ([*BASE, "--duration", "nan"], "--duration"),
        ([*BASE, "--requests", "0"], "--requests"),
        ([*BASE, "--requests", "5", "--duration", "5"], "--requests"),
        ([*BASE, "--warmup", "-1"], "--warmup"),
        ([*BASE, "--seed", "-1"], "--seed"),
        ([*BASE, "--rate", "-1"], "requests_per_s"),
        ([*BASE, "--rate", "x"], "--rate"),
        ([*BASE, "--input-tokens", "many"], "--input-tokens"),
        ([*BASE, "--input-tokens", "0"], "--input-tokens"),
        ([*BASE, "--input-tokens", "9-3"], "--input-tokens"),
        ([*BASE, "--slo", "fast"], "--slo"),
        ([*BASE, "--host", "127.0.0.1:8000"], "--host"),
        ([*BASE, "--vocab-size", "2"], "--vocab-size"),
        ([*BASE, "--tolerance", "much"], "--tolerance"),
        ([*BASE, "--require-prediction"], "--require-prediction"),
        ([*BASE, "--arrivals", "weibull"], "process"),
        ([*BASE, "--arrivals", "gamma"], "gap_cv"),
        ([*BASE, "--gap-cv", "2"], "gap_cv"),
        ([*BASE, "--users", "0"], "users"),
        ([*BASE[2:], "--users", "3", "--duration", "5"], "--duration"),
        ([*BASE, "--users", "3", "--stages", "5x5"], "--stages"),
        ([*BASE, "--turns", "0"], "turns"),
        ([*BASE, "--think", "-1"], "think_s"),
        ([*BASE, "--stages", "fast"], "--stages"),
        (["--slo", "ttft=1", "--trace", "no-such-trace.csv"], "no-such-trace.csv"),
        ([*BASE, "--users", "3"], "--rate is 5.0; expected left out: --users says it"),
        ([*BASE, "--stages", "5x5"], "--rate is 5.0; expected left out: --stages says it"),
        ([*BASE, "--trace", "t.csv"], "--rate is 5.0; expected left out: --trace says it"),
        ([*BASE[2:], "--trace", "t.csv"], "--input-tokens is '10'; expected left out: --trace"),
        ([*BASE[4:], "--trace", "t.csv"], "--output-tokens is '10'; expected left out: --trace"),
        (["--prefix-tokens", "5", "--trace", "t.csv"], "expected left out: --trace says it"),
        ([*BASE, "--think", "1"], "--think is 1.0; expected --users or --turns"),
        ([*BASE, "--skip-unanswered"], "--skip-unanswered"),
        ([*BASE, "--prefix-tokens", "10"], "prefix_tokens"),
        ([*BASE, "--timeout", "0"], "--timeout"),
        (["no-such-plan.json"], "no-such-plan.json"),
        (["no-such-plan.json", "--rate", "5"], "--rate"),
        (["no-such-plan.json", "--prefix-tokens", "5"], "--prefix-tokens is 5; expected left out"),
        (["no-such-plan.json", "--vocab-size", "500"], "--vocab-size is 500; expected left out"),
    ],
)
def test_bad_options(
    arguments: list[str],
    names: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bad input is refused in one line that names it, before anything is touched: exit 2."""
    from loadtest.cli import main  # noqa: PLC0415  (the command, without its process)

    monkeypatch.setattr(sys, "argv", ["loadtest", "run", *arguments])
    with pytest.raises(SystemExit) as left:
        main()

    assert left.value.code == Exit.BAD_INPUT
    assert names in capsys.readouterr().err


def test_rate_beyond_the_client(start_server: ServerStarter, tmp_path: Path) -> None:
    """A rate that no client could send is refused before it is tried."""
    done = run(start_server(), tmp_path / "out", "--duration", "60", rate=1e6)

    assert done.returncode == Exit.BAD_INPUT
    assert "lower rate" in done.stderr


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


def test_report_without_a_run(tmp_path: Path) -> None:
    """A folder that holds no run is refused by name."""
    done = loadtest("report", tmp_path)

    assert done.returncode == Exit.BAD_INPUT
    assert "run.json" in done.stderr
    assert not any(tmp_path.iterdir())
