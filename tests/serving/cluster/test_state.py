from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from minicluster.errors import InputError, TargetFailed
from serving.cluster.local_cluster import CLUSTER, LocalCluster, current_cluster
from serving.cluster.logs import replica_logs
from serving.cluster.state import (
    HOME,
    LOCK,
    LOGS,
    RAY,
    STATE,
    State,
    changing,
    read_state,
    remove_session,
    remove_state,
    write_record,
    write_state,
)
from serving.operations.status import current, is_gone
from tests.full_disk import small_disk
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


def test_forgetting_keeps_only_the_logs(state: State, tmp_path: Path) -> None:
    """After a deployment its logs are there, in place of former ones, and nothing else of it."""
    write_state(state)
    assert [title for title, _ in replica_logs(1)] == [f"app:D err: {state.logs}/worker-1.err"]
    LOGS.mkdir()
    (LOGS / "worker-0.err").write_text(":actor_name:ServeReplica:app:D\nformer\n")
    remove_state(state)
    assert not (tmp_path / "session").exists()
    assert read_state() is None
    assert [text for _, text in replica_logs(1)] == ["bad"]
    assert [each.name for each in HOME.iterdir()] == ["logs"]


@pytest.mark.parametrize("cause", ["No space left on device", "Not a directory"])
def test_logs_that_cannot_be_copied_stay(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """Nothing else of the deployment does; former logs are not lost, and both places are named."""
    with small_disk(tmp_path) as disk, ExitStack() as until_removed:
        monkeypatch.chdir(disk.path)
        write_state(state)
        if cause == "Not a directory":
            LOGS.write_text("former")
        else:
            LOGS.mkdir()
            (LOGS / "worker-0.err").write_text(":actor_name:ServeReplica:app:D\nformer\n")
            until_removed.enter_context(disk.full())
        with pytest.raises(InputError, match=cause) as said:
            remove_state(state)
        assert f"{LOGS} is" in str(said.value)
        assert f"they stay in {state.logs}" in str(said.value)
        assert (state.logs / "worker-1.err").read_text().endswith("bad\n")
        assert read_state() is None
        until_removed.close()
        assert [each.name for each in HOME.iterdir()] == ["logs"]
        former = LOGS if LOGS.is_file() else LOGS / "worker-0.err"
        assert "former" in former.read_text()


def test_only_our_own_folder_is_removed(tmp_path: Path) -> None:
    """Ray's files are in a private folder of their own; earlier versions had none around them."""
    for session in (tmp_path / "one" / RAY, tmp_path / "two"):
        session.mkdir(parents=True)
        remove_session(session)
        remove_session(session)
    assert [*tmp_path.glob("[ot]*")] == []


def test_a_start_that_was_killed_is_said_to_be(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serving up` was killed before Ray had an address: commands say so, and the way out."""
    monkeypatch.setattr("serving.operations.status.cluster_processes", lambda _id: {1})
    write_state(replace(state, address=""))
    with pytest.raises(TargetFailed, match=r"`serving up`, begun .* was killed \(`serving down`"):
        current()
    monkeypatch.setattr("serving.cluster.local_cluster.cluster_processes", lambda _id: {1})
    write_record(CLUSTER, LocalCluster(cluster_id="a", address="", started="now", nodes=()))
    with pytest.raises(TargetFailed, match=r"`serving cluster up`, begun now, .* was killed"):
        current_cluster()


@pytest.mark.parametrize(
    ("recorded", "running", "owner", "gone"),
    [
        ("session_1", "session_1", "us", False),
        ("session_1", "session_1", None, True),  # another directory has taken it down
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


def test_where_ray_serve_does_not_run_nothing_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve ends with its last application, and raises when it is asked for options then."""
    from ray import serve  # noqa: PLC0415  (a second)

    from serving.protocol.app_spec import APP  # noqa: PLC0415
    from serving.replicas.app import owner_of  # noqa: PLC0415

    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr("ray.serve.context._connect", lambda *_: pytest.fail("no Serve"))
    assert owner_of(APP) is None
