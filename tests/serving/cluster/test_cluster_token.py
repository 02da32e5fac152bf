"""The token of a Ray cluster: where it comes from, and what is refused without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from minicluster.errors import InputError
from minicluster.plan import Plan, to_json
from serving.cluster.connection import FIRST_CALL
from serving.cluster.local_cluster import CLUSTER_TOKEN, LocalCluster, token_file
from serving.cluster.ports import free_ports
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
    write_token,
)
from tests.serving.command import serving_here, taken_port
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
    cluster = LocalCluster(cluster_id="x", address="127.0.0.1:2", session="", started="", nodes=())
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


@pytest.fixture
def refusing() -> Iterator[str]:
    """Return the address of a head that refuses every token."""

    def refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        return b""

    _, service, method = FIRST_CALL.split("/")
    handler = grpc.unary_unary_rpc_method_handler(refuse)
    head = grpc.server(ThreadPoolExecutor(max_workers=1))
    head.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: handler})]
    )
    port = head.add_insecure_port("127.0.0.1:0")
    head.start()
    yield f"127.0.0.1:{port}"
    head.stop(None)


def _up(place: Path, plan: Plan, address: str, **variables: str) -> tuple[int, str]:
    """Run `serving up --address`; returns its exit code and its one line of error."""
    (place / "plan.json").write_text(to_json(plan))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = ours | {"HOME": str(place)} | variables
    done = serving_here(place, "up", "plan.json", "--address", address, env=env)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
    return done.returncode, done.stderr


def test_a_foreign_cluster(tmp_path: Path, refusing: str, plan: Plan) -> None:
    """No token, an unreadable one, a wrong one, and no cluster at all: one line each, no wait."""
    code, said = _up(tmp_path, plan, refusing)
    assert (code, f"{TOKEN_PATH} is missing; expected a file with the token" in said) == (2, True)
    code, said = _up(tmp_path, plan, refusing, **{TOKEN_PATH: "/nowhere"})
    assert (code, f"{TOKEN_PATH} is '/nowhere'" in said) == (2, True)
    write_token(tmp_path / ".ray" / "auth_token")  # where Ray looks at last
    code, said = _up(tmp_path, plan, refusing)
    assert (code, "which refuses this one" in said) == (2, True)
    [port] = free_ports(1)
    code, said = _up(tmp_path, plan, f"127.0.0.1:{port}", **{TOKEN: "0" * 64})
    assert (code, "no process listens there" in said) == (5, True)


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


def test_up_refuses_to_encrypt_with_nothing(tmp_path: Path, plan: Plan) -> None:
    """`serving up` names the file that is missing, before it starts or connects to anything."""
    with taken_port() as port:
        code, said = _up(tmp_path, plan, f"127.0.0.1:{port}", **{USE_TLS: "1"})
    assert (code, f"{CERTIFICATES[0]} is missing" in said) == (2, True)
