"""The listening sockets of processes, and their answers to calls without a token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

ANSWER_LIMIT_S = 5.0

CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/HealthCheck",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.serve.ASGIService/HandleRequest",
)
"""One call of each of Ray's gRPC services that changes nothing and takes no arguments."""

ENGINE = "VLLM::"
"""Prefix of the titles of vLLM's processes, whose own protocols are not probed here."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ListeningSocket:
    """One listening socket; `process` is its owner's title or program."""

    process: str
    address: str
    port: int


def sockets(pids: Iterable[int]) -> list[ListeningSocket]:
    """Return the listening sockets of these processes; an inherited socket counts once."""
    by_place: dict[tuple[str, int], ListeningSocket] = {}
    for pid in sorted(pids):
        with suppress(psutil.Error):  # ended meanwhile
            process = psutil.Process(pid)
            title = _title(process.cmdline() or [process.name()])
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ip = ip_address(connection.laddr.ip)
                    address = str(getattr(ip, "ipv4_mapped", None) or ip)
                    port = connection.laddr.port
                    listening = ListeningSocket(process=title, address=address, port=port)
                    by_place.setdefault((address, port), listening)
    return sorted(by_place.values())


def answers(found: Iterable[ListeningSocket]) -> list[tuple[ListeningSocket, str]]:
    """Return the answer of each socket to a gRPC call, or else to HTTP, without a token."""
    probed = list(found)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(zip(probed, pool.map(_answer, probed), strict=True))


def _answer(listening: ListeningSocket) -> str:
    if listening.process.startswith(ENGINE):
        return "-"
    ip = ip_address(listening.address)
    host = ("127.0.0.1" if ip.version == 4 else "::1") if ip.is_unspecified else str(ip)  # noqa: PLR2004
    return _grpc_answer(host, listening.port) or _http_answer(host, listening.port) or "-"


def _grpc_answer(host: str, port: int) -> str | None:
    with grpc.insecure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as channel:
        for call in CALLS:
            try:
                channel.unary_unary(call)(b"", timeout=ANSWER_LIMIT_S)
            except grpc.RpcError as error:
                code = error.code()
            else:
                code = grpc.StatusCode.OK
            if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                return None
            if code != grpc.StatusCode.UNIMPLEMENTED:
                return str(code.name)
    return "UNIMPLEMENTED"


def _http_answer(host: str, port: int) -> str | None:
    connection = HTTPConnection(host, port, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("GET", "/")
        return f"HTTP {connection.getresponse().status}"
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def _title(command: list[str]) -> str:
    """Return the title of a process that has one, or else its module, script or program."""
    if "::" in command[0]:
        return command[0].split()[0]
    if "-m" in command:
        return command[command.index("-m") + 1]
    scripts = [word for word in command[1:] if word.endswith(".py")]
    return Path(scripts[0] if scripts else command[0]).name
