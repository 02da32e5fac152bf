"""The ranks of a group in processes of their own: rank 0 hosts the group, over a Unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from typing import TYPE_CHECKING, cast

from minicluster.engine_model.lockstep import Stretch
from serving.simulated.group import Lockstep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from serving.simulated.group import Group, Member, Propose

JOIN_LIMIT_S = 600.0
"""Longest wait for the other ranks: two busy cores start about twenty processes a minute."""

CONNECT_POLL_S = 0.2
"""Interval at which a rank tries to reach rank 0 while that starts."""

CREDENTIALS = struct.Struct("3i")
"""Layout of SO_PEERCRED on Linux: identifiers of the process, user and group of a peer."""


async def join_gang(gang: str, rank: int, size: int) -> Group:
    """
    Wait until all ranks of a gang are there; return their group.

    The caller must join its own engine before it awaits anything. The name of the socket is
    abstract, so that no file outlives the ranks, and only processes of the same user may join. A
    process that ends fails the group.

    Args:
        gang: its name, which no other gang of this machine has.
        rank: of the caller.
        size: number of ranks.

    Raises:
        GangIncompleteError: not all ranks came, or not to this machine.
    """
    address = f"\0minicluster-gang-{gang}"
    try:
        async with asyncio.timeout(JOIN_LIMIT_S):
            return await (_host(address, size) if rank == 0 else _connect(address))
    except (TimeoutError, ConnectionError) as error:
        raise GangIncompleteError(
            f"rank {rank} of gang {gang}: expected {size} ranks on this machine within"
            f" {JOIN_LIMIT_S:g} s ({error!r}); simulated engines of a group share one machine"
        ) from error


class GangIncompleteError(Exception):
    """The ranks of a gang did not find one another."""


async def _host(address: str, size: int) -> Group:
    connections: list[_Connection] = []
    with _unix_socket() as listening:
        listening.bind(address)
        listening.listen(size)
        while len(connections) < size - 1:
            peer, _ = await asyncio.get_running_loop().sock_accept(listening)
            if _is_own(peer):
                connections.append(await _connection(peer))
            else:
                peer.close()
    if any(connection.lost for connection in connections):
        raise ConnectionResetError("a rank ended")
    group = Lockstep(size)
    for connection in connections:
        _DistantRank(connection, group)
    return group


async def _connect(address: str) -> Group:
    own = await _reached(address)
    if not _is_own(own):
        own.close()
        raise ConnectionAbortedError("rank 0 belongs to another user")
    connection = await _connection(own)
    await connection.called.wait()
    if connection.lost:
        raise ConnectionResetError("rank 0 ended")
    return _DistantGroup(connection)


async def _reached(address: str) -> socket.socket:
    """Return a socket that is connected to rank 0's, once that listens."""
    while True:
        own = _unix_socket()
        try:
            await asyncio.get_running_loop().sock_connect(own, address)
        except ConnectionRefusedError:
            own.close()
            await asyncio.sleep(CONNECT_POLL_S)
        else:
            return own


def _unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(0)
    return made


def _is_own(peer: socket.socket) -> bool:
    """Say whether a process of this user is at the other end."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.getuid())


async def _connection(connected: socket.socket) -> _Connection:
    loop = asyncio.get_running_loop()
    return (await loop.create_unix_connection(_Connection, sock=connected))[1]


class _Connection(asyncio.Protocol):
    """
    Calls to and from another process, in order: a JSON array `[name, argument …]` a line.

    Attributes:
        called: once the other process has called, or has ended.
        lost: it has ended.
    """

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.lost = False
        self._unread = b""
        self._calls: Mapping[str, Callable[..., None]] = {}

    def call(self, name: str, *arguments: object) -> None:
        if not self._transport.is_closing():
            self._transport.write(json.dumps([name, *arguments]).encode() + b"\n")

    def close(self) -> None:
        """End; to the other process this one is dead."""
        self._transport.close()

    def listen(self, calls: Mapping[str, Callable[..., None]], ended: Callable[[], None]) -> None:
        """Take calls from now on, until the other process ends."""
        self._calls, self._ended = calls, ended
        self.data_received(b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self.called.set()
        while self._calls and b"\n" in self._unread:
            line, self._unread = self._unread.split(b"\n", 1)
            name, *arguments = json.loads(line)
            self._calls[name](*arguments)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost = True
        self.called.set()
        if self._calls:
            self._ended()


class _DistantRank:
    """A rank in another process, as the group sees it: `serving.simulated.group.Member`."""

    def __init__(self, connection: _Connection, group: Lockstep) -> None:
        self._call, self._close = connection.call, connection.close
        propose = group.join(self)
        connection.listen(
            {
                "propose": lambda given: propose(_stretch(given)),
                "freeze": group.freeze,
            },
            ended=group.fail,
        )
        self._call("joined")

    def ask(self) -> None:
        self._call("ask")

    def begin(self, common: Stretch | None) -> None:
        self._call("begin", _numbers(common))

    def freeze(self, seconds: float) -> None:
        self._call("freeze", seconds)

    def died(self) -> None:
        self._close()


class _DistantGroup:
    """The group in rank 0's process, as another rank sees it: `serving.simulated.group.Group`."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def join(self, member: Member) -> Propose:
        self._connection.listen(
            {
                "joined": lambda: None,
                "ask": member.ask,
                "begin": lambda given: member.begin(_stretch(given)),
                "freeze": member.freeze,
            },
            ended=member.died,
        )
        return lambda stretch: self._connection.call("propose", _numbers(stretch))

    def freeze(self, seconds: float) -> None:
        self._connection.call("freeze", seconds)

    def fail(self) -> None:
        self._connection.close()


def _numbers(stretch: Stretch | None) -> list[float] | None:
    """Return a stretch as a message has it."""
    if stretch is None:
        return None
    return [stretch.start_s, stretch.steps, stretch.line_s, stretch.half_s]


def _stretch(given: list[float] | None) -> Stretch | None:
    """Return a stretch as it was before JSON made a list of it."""
    if given is None:
        return None
    start_s, steps, line_s, half_s = given
    return Stretch(start_s, int(steps), line_s, half_s)
