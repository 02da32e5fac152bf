"""Endpoints that answer badly, differently or not at all: exit codes, and what the command says."""

from __future__ import annotations

from pathlib import Path

from minicluster.errors import Exit
from minicluster.plan import to_json
from minicluster.workload.samples import read_samples
from tests.loadtest.command import FAST, ServerStarter, answered, loadtest, run, verdict_in
from tests.loadtest.made import make_plan


def test_bad_answers(start_server: ServerStarter, tmp_path: Path) -> None:
    """A server that answers badly: exit 5, what it said and how many it was; samples are kept."""
    done = run(start_server(**FAST, fail_every=1), tmp_path, "--requests", "40")

    assert done.returncode == Exit.TARGET_FAILED, done.stderr
    assert "bad status" in done.stdout
    assert "configured to fail" in done.stdout
    assert len(read_samples(tmp_path / "samples.jsonl")) >= 40
    assert verdict_in(tmp_path)["exit_code"] == Exit.TARGET_FAILED


def test_server_that_dies(start_server: ServerStarter, tmp_path: Path) -> None:
    """A server that dies mid-run ends the run, with the samples so far: exit 5."""
    done = run(start_server(**FAST, die_after_s=1.0), tmp_path, "--duration", "60")

    assert done.returncode == Exit.TARGET_FAILED, done.stderr
    assert "stopped answering" in done.stdout
    assert answered(tmp_path)
    assert verdict_in(tmp_path)["metadata"]["wall_s"] < 60


def test_plan_for_another_model(start_server: ServerStarter, tmp_path: Path) -> None:
    """A plan for a model that the endpoint does not serve is refused, both named: exit 2."""
    plan = tmp_path / "plan.json"
    plan.write_text(to_json(make_plan()))
    done = loadtest("run", plan, "--host", start_server(model="llama"), "-o", tmp_path / "out")

    assert done.returncode == Exit.BAD_INPUT
    assert "fake" in done.stderr
    assert "llama" in done.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_listens(deaf_port: int, tmp_path: Path) -> None:
    """No server: one line with the address and the way out, nothing written, exit 5."""
    done = run(f"http://127.0.0.1:{deaf_port}", tmp_path / "out")

    assert done.returncode == Exit.TARGET_FAILED
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{deaf_port}" in done.stderr
    assert "serving up" in done.stderr
    assert not (tmp_path / "out").exists()


def test_model_not_served(start_server: ServerStarter, tmp_path: Path) -> None:
    done = run(start_server(), tmp_path / "out", "--model", "llama")

    assert done.returncode == Exit.BAD_INPUT
    assert "fake" in done.stderr
    assert not (tmp_path / "out").exists()
