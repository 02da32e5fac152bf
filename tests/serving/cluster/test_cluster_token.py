"""The token of a Ray cluster: where it comes from, and what is refused without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

import pytest

from minicluster.errors import InputError
from serving.cluster.local_cluster import CLUSTER_TOKEN, LocalCluster, token_file
from serving.cluster.processes import environment
from serving.cluster.state import TOKEN as OWN_TOKEN
from serving.cluster.state import remove_state, write_state
from serving.cluster.token import (
    CERTIFICATES,
    MODE,
    TOKEN,
    TOKEN_PATH,
    USE_TLS,
    refuse_missing_certificates,
    refuse_missing_token,
    write_token,
)
from tests.serving.plans import make_state


def test_only_its_owner_reads_a_token(tmp_path: Path) -> None:
    """A token is random, its file is its owner's alone, and a new one replaces it."""
    file, before = tmp_path / "there" / "token", os.umask(0)
    try:
        write_token(file)
        first = file.read_text()
        write_token(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(first)) == 32
    assert file.read_text() != first


def test_a_token_that_cannot_be_written_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a file, or on a full disk, as /dev/full is one; nothing is left of it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; it has to be a writable folder"):
        write_token(tmp_path / "file" / "token")
    monkeypatch.setattr(os, "fdopen", lambda file, _mode: full(file))
    with pytest.raises(InputError, match="No space left on device"):
        write_token(tmp_path / "token")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def full(file: int) -> TextIO:
    os.close(file)
    return Path("/dev/full").open("w")


def test_processes_get_the_path_of_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we start authenticates by the cluster's file, whatever the shell says of others."""
    monkeypatch.setenv(MODE, "disabled")
    monkeypatch.setenv(TOKEN, "another cluster's")
    monkeypatch.setenv(TOKEN_PATH, "/another/cluster")
    monkeypatch.chdir(tmp_path)
    write_token(OWN_TOKEN)
    started = environment("x", OWN_TOKEN)
    assert started[MODE] == "token"
    assert started[TOKEN_PATH] == str(tmp_path / OWN_TOKEN)
    assert TOKEN not in started
    assert OWN_TOKEN.read_text() not in started.values()


def test_a_token_goes_with_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of an address is its cluster's; it is removed with what was deployed."""
    monkeypatch.chdir(tmp_path)
    cluster = LocalCluster(cluster_id="x", address="127.0.0.1:2", started="", nodes=())
    state = make_state(address="127.0.0.1:1")
    write_token(OWN_TOKEN)
    write_state(state)
    monkeypatch.setattr("serving.cluster.local_cluster.read_cluster", lambda: cluster)
    found = [token_file(f"127.0.0.1:{port}") for port in (1, 2, 3)]
    assert found == [OWN_TOKEN, CLUSTER_TOKEN, None]
    remove_state(state)
    assert not OWN_TOKEN.exists()
    write_state(make_state(address="127.0.0.1:2", cluster_id=""))
    assert token_file("127.0.0.1:2") == CLUSTER_TOKEN


def test_ray_finds_a_token_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a variable the file at Ray's own place counts, where Ray asks for a token at all."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    write_token(file)
    refuse_missing_token({}, "h:1")
    file.write_text(" ")
    with pytest.raises(InputError, match="h:1"):
        refuse_missing_token({}, "h:1")
    refuse_missing_token({MODE: "disabled"}, "h:1")


def test_encryption_wants_its_files(tmp_path: Path) -> None:
    """With RAY_USE_TLS each certificate or key must be there; without it nothing is asked for."""
    variables = {}
    for name in CERTIFICATES:
        with pytest.raises(InputError, match=f"{name} is missing"):
            refuse_missing_certificates({USE_TLS: "1", **variables})
        with pytest.raises(InputError, match=f"{name} is '/nowhere'"):
            refuse_missing_certificates({USE_TLS: "true", **variables, name: "/nowhere"})
        variables[name] = str(tmp_path / name)
        (tmp_path / name).write_text("certificate")
    refuse_missing_certificates({USE_TLS: "1", **variables})
    refuse_missing_certificates({USE_TLS: "0"})
    refuse_missing_certificates({})
