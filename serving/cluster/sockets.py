"""The listening sockets of processes, and their answers to calls without a token."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ListeningSocket:
    """One listening socket; `process` is its owner's title or program."""

    process: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ip_address(self.address).is_loopback


def sockets(pids: Iterable[int]) -> list[ListeningSocket]:
    """Return the listening sockets of these processes; an inherited socket counts once."""
    listening = dict(_listening())
    found: dict[str, ListeningSocket] = {}
    for pid in sorted(pids):
        with suppress(OSError):  # ended meanwhile
            process = _process(pid)
            for inode in _inodes(pid) & listening.keys():
                address, port = listening[inode]
                found.setdefault(
                    inode, ListeningSocket(process=process, address=address, port=port)
                )
    return sorted(found.values())


def answers(found: Iterable[ListeningSocket]) -> list[tuple[ListeningSocket, str]]:
    """Return the answer of each socket to a gRPC call, or else to HTTP, without a token."""
    probed = list(found)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(zip(probed, pool.map(_answer, probed), strict=True))


def _answer(listening: ListeningSocket) -> str:
    """Return the answer of one socket; `-`: an engine's, or neither gRPC nor HTTP."""
    if listening.process.startswith(ENGINE):
        return "-"
    own = ip_address(listening.address)
    host = ("127.0.0.1" if own.version == 4 else "::1") if own.is_unspecified else str(own)  # noqa: PLR2004
    return _grpc_answer(host, listening.port) or _http_answer(host, listening.port) or "-"


def _grpc_answer(host: str, port: int) -> str | None:
    """Return the status of the first implemented call; `None`: no gRPC server."""
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
    """Return the status of `GET /`; `None`: no HTTP server."""
    connection = HTTPConnection(host, port, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("GET", "/")
        return f"HTTP {connection.getresponse().status}"
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def _listening() -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield inode, address and port of every listening TCP socket of this machine."""
    for file in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):  # a kernel without IPv6
            for line in file.read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS:
                    address, _, port = fields[1].rpartition(":")
                    yield fields[9], (_address(address), int(port, 16))


def _address(written: str) -> str:
    """Return an address in its usual form; the kernel writes words of four bytes, reversed."""
    words = [bytes.fromhex(written[i : i + 8])[::-1] for i in range(0, len(written), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    address = ip_address(socket.inet_ntop(family, b"".join(words)))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _inodes(pid: int) -> set[str]:
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            kind, _, inode = str(file.readlink()).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _process(pid: int) -> str:
    """Return the title of a process that has one, or else its module, script or program."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "::" in words[0]:
        return words[0].split()[0]
    if "-m" in words:
        return words[words.index("-m") + 1]
    scripts = [word for word in words[1:] if word.endswith(".py")]
    return Path(scripts[0] if scripts else words[0]).name
