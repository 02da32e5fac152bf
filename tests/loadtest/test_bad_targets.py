"""Endpoints that answer badly, differently or not at all: exit codes, and what the command says."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from loadtest.samples import read_samples
from sizing.errors import Exit
from sizing.plan import to_json

from .command import FAST, answered, loadtest, run, verdict_in

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import PlanMaker, ServerStarter


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
