"""Endpoints that die, serve something else or are not there: exit codes, and what is said."""

from __future__ import annotations

from pathlib import Path

from minicluster.errors import Exit
from tests.loadtest.command import FAST, ServerStarter, answered, loadtest, run, verdict_in
from tests.loadtest.made import make_plan, plan_json


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
