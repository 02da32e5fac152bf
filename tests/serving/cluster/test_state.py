from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from minicluster.errors import InputError, NegativeAnswer, TargetFailed
from serving.cluster.logs import replica_logs
from serving.cluster.state import HOME, LOGS, STATE, State, read_state, remove_state, write_state
from serving.operations.status import current, is_gone

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory of the test's own."""
    monkeypatch.chdir(tmp_path)


def _state(session: str) -> State:
    return State(
        cluster_id="feedfacefeedface",
        address="127.0.0.2:1",
        base_url="http://127.0.0.1:1",
        target="cpu",
        plan=str(HOME / "plan.json"),
        plan_hash="0" * 16,
        deployment=str(HOME / "deployment.json"),
        session=session,
        started="2026-11-20T00:00:00+00:00",
        changes=("a change",),
        deadlines_s=(None, 30.0),
    )


def test_state_survives_the_command(tmp_path: Path) -> None:
    """What is written is what is read."""
    state = _state(str(tmp_path / "session"))
    write_state(state)
    assert read_state() == state


def test_nothing_deployed() -> None:
    """Where nothing is deployed, commands say so."""
    assert read_state() is None
    with pytest.raises(NegativeAnswer, match="nothing is deployed"):
        current()


def test_a_dead_cluster_is_reported(tmp_path: Path) -> None:
    """A state whose processes are gone is a failed target, with the way out."""
    write_state(_state(str(tmp_path / "session")))
    with pytest.raises(TargetFailed, match="serving down"):
        current()


def test_unreadable_state_is_bad_input() -> None:
    """A state file that is not ours is named."""
    HOME.mkdir(parents=True)
    STATE.write_text("{}")
    with pytest.raises(InputError, match=r"state\.json"):
        read_state()


def test_forgetting_keeps_only_the_logs(tmp_path: Path) -> None:
    """After a deployment its logs are kept, and nothing else of it."""
    session = tmp_path / "session"
    logs = session / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text(":job_id:1\n:actor_name:ServeReplica:app:Decode\nbad\n")
    state = _state(str(session))
    write_state(state)
    assert [title for title, _ in replica_logs(1)] == [f"app:Decode err: {logs}/worker-1.err"]
    remove_state(state)
    assert not session.exists()
    assert not STATE.exists()
    assert [(text, LOGS.is_dir()) for _, text in replica_logs(1)] == [("bad", True)]


def test_logs_that_cannot_be_kept_keep_no_state(tmp_path: Path) -> None:
    """Where logs cannot be written the deployment is forgotten all the same."""
    logs = tmp_path / "session" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("bad\n")
    state = _state(str(tmp_path / "session"))
    write_state(state)
    LOGS.write_text("a file where the directory of logs would be")
    remove_state(state)
    assert read_state() is None
    assert not (tmp_path / "session").exists()


def test_missing_logs_are_reported() -> None:
    """Without any deployment, past or present, `serving logs` says so."""
    with pytest.raises(NegativeAnswer, match="no logs"):
        list(replica_logs(1))


@pytest.mark.parametrize(
    ("recorded", "running", "gone"),
    [
        ("session_1", "session_1", False),
        ("session_1", "session_2", True),  # its head started again, at the same address
        ("", "session_1", False),  # written before clusters were told apart
    ],
)
def test_a_foreign_cluster_is_gone(
    monkeypatch: pytest.MonkeyPatch, recorded: str, running: str, *, gone: bool
) -> None:
    """A deployment is forgotten only where the very cluster that it is on runs no more."""
    monkeypatch.setattr("serving.cluster.connection.instance_of", lambda _address: running)
    assert is_gone(replace(_state(""), cluster_id="", instance=recorded)) is gone


def test_a_cluster_without_a_listener_is_gone() -> None:
    """Ray would wait many minutes for a head that a restart took elsewhere."""
    assert is_gone(replace(_state(""), cluster_id="", instance="session_1"))
