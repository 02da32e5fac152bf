"""Where the processes of a running deployment listen, and what each answers without a token."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from serving.cluster.processes import cluster_processes
from tests.serving.command import serving

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
TABLE = re.compile(r"^\| `([^`]+)` \| (loopback|all interfaces) \| ([^|]+) \|", re.MULTILINE)
"""A row of the table in docs/operations.md: process, address on one machine, what it answers."""


@pytest.fixture(scope="module")
def listening(base_url: str, place: Path) -> list[dict[str, Any]]:  # noqa: ARG001  (it is up)
    """Return what `serving status --sockets` says of the running deployment."""
    found: list[dict[str, Any]] = json.loads(serving(place, "status", "--sockets", "--json").stdout)
    return found


def test_only_what_is_documented_listens(listening: list[dict[str, Any]]) -> None:
    """Each listening socket is a row of the table: its process, its address and its answer."""
    rows = [
        (re.compile(name.replace("*", ".*")), where, said.strip().split(", "))
        for name, where, said in TABLE.findall((ROOT / "docs/operations.md").read_text())
    ]
    assert listening
    for each in listening:
        local = ip_address(each["address"]).is_loopback
        assert any(
            name.fullmatch(each["process"])
            and each["answers"] in said
            and (where == "all interfaces" or local)
            for name, where, said in rows
        ), listening


def test_every_ray_server_wants_the_token(listening: list[dict[str, Any]]) -> None:
    """
    Head, raylets, agents, controller and replicas refuse a call without it, on loopback too.

    Ray Serve's gRPC servers alone are on other addresses than loopback.
    """
    refusing = [each for each in listening if each["answers"] == "UNAUTHENTICATED"]
    names = {each["process"].partition(":minicluster")[0] for each in refusing}
    assert {"gcs_server", "raylet", "ray::DashboardAgent", "ray::ServeReplica"} <= names
    for each in listening:
        if not ip_address(each["address"]).is_loopback:
            assert each in refusing
            assert each["process"].startswith("ray::ServeReplica")


def test_no_process_has_the_token_in_its_environment(base_url: str, place: Path) -> None:  # noqa: ARG001
    """The processes know where the token lies; their environment does not show it."""
    home = place / ".minicluster/serving"
    token = home / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_bytes().strip()
    assert len(secret) >= 32
    environments = []
    for pid in cluster_processes(json.loads((home / "state.json").read_text())["cluster_id"]):
        with suppress(OSError):  # gone meanwhile
            process = Path(f"/proc/{pid}")
            environments.append(
                (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            )
    assert not [each for each in environments if secret in each]
    path = f"RAY_AUTH_TOKEN_PATH={token}".encode()
    assert sum(path in each.split(b"\0") for each in environments) >= 5
