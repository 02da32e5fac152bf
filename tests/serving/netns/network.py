"""Hosts that are network namespaces: own addresses, links that can be slowed down or cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.231.77"
"""Of the hosts; the bridge, and with it this process, is .254."""

BURST_BYTES = 64 << 10
"""That pass at once: far less than a KV cache, more than a timer tick of any rate here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace; the link to it is `device` inside and `port` at the bridge."""

    name: str
    namespace: str
    address: str
    port: str
    device: str = "eth0"

    def start(
        self, command: Sequence[str], *, env: dict[str, str], cwd: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                env={**os.environ, **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def limited(self, bits_per_s: float) -> AbstractContextManager[None]:
        """Let it send no faster, for the duration of the block."""
        tc, root = ("tc", "-n", self.namespace, "qdisc"), ("dev", self.device, "root")
        bucket = _bucket(f"{bits_per_s:.0f}bit")
        return _changed((*tc, "replace", *root, *bucket), (*tc, "del", *root))

    def cut_off(self) -> AbstractContextManager[None]:
        """Take its link down for the duration of the block."""
        link = ("ip", "link", "set", self.port)
        return _changed((*link, "down"), (*link, "up"))

    def unreachable_from(self, other: Host) -> AbstractContextManager[None]:
        """Let what *other* sends here vanish, for the duration of the block."""
        route, hole = ("ip", "-n", other.namespace, "route"), ("blackhole", f"{self.address}/32")
        return _changed((*route, "add", *hole), (*route, "del", *hole))


@contextmanager
def _changed(change: Sequence[str], undo: Sequence[str]) -> Iterator[None]:
    _ip_tc(*change)
    try:
        yield
    finally:
        _ip_tc(*undo)


@contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """
    Have hosts of these names, joined by a bridge, for the duration of the block.

    Each finds every other by its name, and its own address by `hostname -i`.
    """
    tag = f"mc{os.getpid() % 100_000}"
    hosts = {
        name: Host(
            name=name,
            namespace=f"{tag}-{name}",
            address=f"{NETWORK}.{number}",
            port=f"{tag}p{number}",
        )
        for number, name in enumerate(names, start=1)
    }
    try:
        _ip_tc("ip", "link", "add", tag, "type", "bridge")
        _ip_tc("ip", "addr", "add", f"{NETWORK}.254/24", "dev", tag)
        _ip_tc("ip", "link", "set", tag, "up")
        for host in hosts.values():
            _add(host, hosts, tag)
        yield hosts
    finally:
        for host in hosts.values():
            for gone in (("link", "del", host.port), ("netns", "del", host.namespace)):
                with suppress(subprocess.CalledProcessError):
                    _ip_tc("ip", *gone)
            shutil.rmtree(_etc(host), ignore_errors=True)
        with suppress(subprocess.CalledProcessError):
            _ip_tc("ip", "link", "del", tag)


def _add(host: Host, hosts: dict[str, Host], bridge: str) -> None:
    inside = ("ip", "-n", host.namespace)
    _ip_tc("ip", "netns", "add", host.namespace)
    peer = ("peer", "name", host.device, "netns", host.namespace)
    _ip_tc("ip", "link", "add", host.port, "type", "veth", *peer)
    _ip_tc("ip", "link", "set", host.port, "master", bridge, "up")
    _ip_tc(*inside, "addr", "add", f"{host.address}/24", "dev", host.device)
    for device in ("lo", host.device):
        _ip_tc(*inside, "link", "set", device, "up")
    # Without a default route vLLM takes itself to be at 127.0.0.1.
    _ip_tc(*inside, "route", "add", "default", "via", f"{NETWORK}.254")
    _etc(host).mkdir(parents=True)
    lines = [f"{host.address} {os.uname().nodename}"]
    lines += [f"{each.address} {each.name}" for each in hosts.values()]
    # `ip netns exec` puts them over those of /etc. No name server: a query is refused at once.
    (_etc(host) / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    (_etc(host) / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", f"{BURST_BYTES}b", "latency", "200ms")


def _etc(host: Host) -> Path:
    return Path("/etc/netns") / host.namespace


def _ip_tc(*command: str) -> None:
    """Run `ip` or `tc`, whose errors are the test's."""
    subprocess.run(command, check=True)
