from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from minicluster.errors import InputError, TargetFailed
from serving.cluster.logs import replica_logs
from serving.cluster.state import (
    HOME,
    LOCK,
    LOGS,
    STATE,
    State,
    changing,
    read_state,
    remove_state,
    write_state,
)
from serving.operations.status import current, is_gone
from tests.serving.plans import make_state


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Return the state of a deployment, with logs, in a directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    session = tmp_path / "session"
    state = make_state(session=str(session), changes=("a change",), deadlines_s=(None, 30.0))
    state.logs.mkdir(parents=True)
    (state.logs / "worker-1.err").write_text(":job_id:1\n:actor_name:ServeReplica:app:D\nbad\n")
    return state


def test_state_survives_the_command(state: State) -> None:
    """What is written is what is read; its cluster is gone, which is said with the way out."""
    write_state(state)
    assert read_state() == state
    with pytest.raises(TargetFailed, match="serving down"):
        current()


def test_one_command_at_a_time_changes_a_deployment() -> None:
    """The second one is refused and names the first; after it, it is free."""
    refused = pytest.raises(InputError, match=f"in use by process {os.getpid()} ")
    with changing(), refused, changing():
        pass
    with changing():
        pass
    assert not LOCK.exists()


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON"])
def test_a_file_that_is_not_ours_is_named(text: str) -> None:
    assert read_state() is None
    HOME.mkdir(parents=True)
    STATE.write_text(text)
    with pytest.raises(InputError, match=r"state\.json"):
        read_state()


@pytest.mark.parametrize("writable", [True, False])
def test_forgetting_keeps_only_the_logs(state: State, tmp_path: Path, *, writable: bool) -> None:
    """After a deployment its logs are kept, if they can be, and nothing else of it."""
    write_state(state)
    assert [title for title, _ in replica_logs(1)] == [f"app:D err: {state.logs}/worker-1.err"]
    if not writable:
        LOGS.write_text("a file where the directory of logs would be")
    remove_state(state)
    assert not (tmp_path / "session").exists()
    assert read_state() is None
    if writable:
        assert [text for _, text in replica_logs(1)] == ["bad"]


@pytest.mark.parametrize(
    ("recorded", "running", "owner", "gone"),
    [
        ("session_1", "session_1", "us", False),
        ("session_1", "session_1", None, False),  # nothing is deployed there
        ("session_1", "session_1", "others", True),  # another directory deployed
        ("session_1", "session_2", "us", True),  # its head started again, at the same address
        ("", "session_1", "us", False),  # written before clusters were told apart
    ],
)
def test_a_deployment_on_a_foreign_cluster_is_gone(
    monkeypatch: pytest.MonkeyPatch, recorded: str, running: str, owner: str | None, *, gone: bool
) -> None:
    """It is forgotten where its cluster runs no more, or something else has been deployed."""
    monkeypatch.setattr("serving.cluster.connection.connected", lambda _address: nullcontext())
    monkeypatch.setattr("serving.cluster.connection.instance_of", lambda _address: running)
    monkeypatch.setattr("serving.replicas.app.owner_of", lambda _app: owner)
    assert is_gone(make_state(cluster_id="", instance=recorded, owner="us")) is gone


def test_a_cluster_without_a_listener_is_gone() -> None:
    """Ray would wait many minutes for a head that a restart took elsewhere."""
    assert is_gone(make_state(cluster_id="", instance="session_1"))
