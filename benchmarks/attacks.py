"""
Attacks on the endpoint's HTTP server, and what its other clients notice of them.

    python benchmarks/attacks.py            # about 6 minutes on 2 cores
    python benchmarks/attacks.py --endpoints 2
    python benchmarks/attacks.py --json

Deploys an 8B plan on simulated engines (`serving up --engine simulated`) on loopback, keeps four
streams under way, and attacks their endpoint from processes of low priority, each attack once and
bounded. Exits with 3 if memory, `/health`, a stream or the admission of others misses its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from minicluster.command import terminable
from minicluster.plan import read_plan
from serving.cluster.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
PLAN = ("llama-3.1-8b-h100", "--set", "model.max_context_tokens=65536", "--set", "slo.itl_s=0.1")
SLOWDOWN = 4.0
MODEL_BYTES = 16 * 65_536 + 65_536
"""Longest body that the endpoint of this plan takes."""

MOST_GROWTH_MIB = 50.0
MOST_HEALTH_MS = 100.0
STREAMS = 4
OTHERS = 20
"""Requests sent before and after each attack; as many have to be admitted."""

HEADERS_BYTES = 300 << 20
SILENT = 300
FLOODS, FLOOD_S = 10, 15.0
STALLED = 13
STALLED_TOKENS = 1500
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    One attack, and what was noticed of it.

    Attributes:
        growth_mib: of the memory of the endpoint process that grew most, at its highest.
        health_ms: slowest answer of /health.
        gap_s: longest time between two tokens of a stream under way, in seconds of the plan.
        before, after: requests of others that were admitted.
        note: what became of the attack.
    """

    attack: str
    growth_mib: float
    health_ms: float
    gap_s: float
    before: int
    after: int
    note: str

    def holds(self, itl_s: float) -> bool:
        """Return whether nobody noticed it."""
        return (
            self.growth_mib < MOST_GROWTH_MIB
            and self.health_ms < MOST_HEALTH_MS
            and self.gap_s < itl_s
            and self.after >= self.before
        )


class Watch:
    """What one client sees meanwhile: memory, /health and streams."""

    def __init__(self, port: int, processes: list[psutil.Process]) -> None:
        self._base_url = f"http://{HOST}:{port}"
        self._processes = processes
        self._ended = False
        self.reset()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))
        self._thread.start()

    def reset(self) -> None:
        """Forget what has been seen."""
        self._start_bytes = {each: each.memory_info().rss for each in self._processes}
        self.growth_bytes = 0
        self.health_s = self.gap_s = 0.0

    def _growth_bytes(self) -> list[int]:
        return [each.memory_info().rss - begun for each, begun in self._start_bytes.items()]

    def end(self) -> None:
        """End the streams."""
        self._ended = True
        self._thread.join()

    async def _watch(self) -> None:
        async with httpx.AsyncClient(base_url=self._base_url, timeout=30.0) as client:
            streams = [asyncio.create_task(self._stream(client)) for _ in range(STREAMS)]
            while not self._ended:
                started = time.perf_counter()
                await client.get("/health")
                self.health_s = max(self.health_s, time.perf_counter() - started)
                self.growth_bytes = max(self.growth_bytes, *self._growth_bytes())
                await asyncio.sleep(0.02)
            for each in streams:
                each.cancel()

    async def _stream(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": [5] * 10, "max_tokens": 4000, "stream": True}
        while True:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                last: float | None = None
                async for line in answer.aiter_lines():
                    if line.startswith('data: {"id"'):
                        now = time.perf_counter()
                        self.gap_s = max(self.gap_s, now - (now if last is None else last))
                        last = now
            await asyncio.sleep(0.5)


def connection(port: int, limit_s: float = 5.0) -> socket.socket:
    """Return a connection to the endpoint."""
    return socket.create_connection((HOST, port), timeout=limit_s)


def sent(port: int, *parts: bytes, limit_s: float = 5.0) -> str:
    """Send parts until the server closes the connection; return the status of its answer."""
    with connection(port, limit_s) as client:
        with suppress(OSError):
            for part in parts:
                client.sendall(part)
        with suppress(OSError):
            return client.recv(4096).partition(b" ")[2][:3].decode() or "closed"
    return "no answer"


def counted(answers: list[str]) -> str:
    """Return how often each answer came."""
    return ", ".join(f"{answers.count(each)} x {each}" for each in sorted({*answers}))


def headers(port: int) -> str:
    """300 MiB of headers, on 30 connections one after the other."""
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 8000) for number in range(128))
    each = HEADERS_BYTES // 30 // len(lines)
    return counted([sent(port, POST, *[lines] * each) for _ in range(30)])


def silent_connections(port: int) -> str:
    """900 connections that say nothing, half of their headers, half of their body."""
    begun = (b"", POST, POST + b"Content-Length: 90\r\n\r\n{")
    with ExitStack() as stack:
        held = [
            (stack.enter_context(connection(port)), part) for part in begun for _ in range(SILENT)
        ]
        for client, part in held:
            client.sendall(part)
        time.sleep(70.0)
        left = 0
        for client, _ in held:
            client.setblocking(False)  # noqa: FBT003
            with suppress(OSError):
                while client.recv(4096):
                    pass
                continue
            left += 1
    return f"{left} of {len(held)} left after 70 s"


def long_bodies(port: int) -> str:
    """60 bodies of 8 MiB, half of them announced, and 60 that stop before their end."""
    part = b"x" * (1 << 20)
    chunk = b"%x\r\n%s\r\n" % (len(part), part)

    def send(number: int) -> str:
        if number % 3 == 0:
            return sent(port, POST, b"Content-Length: 8388608\r\n\r\n", *[part] * 8)
        if number % 3 == 1:
            return sent(port, POST, b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 8)
        length = b"Content-Length: %d\r\n\r\n" % MODEL_BYTES
        return sent(port, POST, length, part, limit_s=75.0)

    with ThreadPoolExecutor(120) as pool:
        return counted(list(pool.map(send, range(120))))


def many_parts(port: int) -> str:
    """20 bodies of the longest length, of very many lists, objects, strings and numbers."""
    answers = []
    for part in (b"[],", b"{},", b'"",', b"1,") * 5:
        body = b'{"prompt":[' + part * ((MODEL_BYTES - 20) // len(part)) + b"1]}"
        answers.append(sent(port, POST, b"Content-Length: %d\r\n\r\n" % len(body), body))
    return counted(answers)


def tiny_chunks(port: int) -> str:
    """Bodies in chunks of one byte, from 10 clients for 15 s, that connect again when refused."""
    end_s = time.monotonic() + FLOOD_S
    chunks = b"1\r\nx\r\n" * 20_000

    def flood(_number: int) -> list[str]:
        answers = []
        while time.monotonic() < end_s:
            answers.append(sent(port, POST, b"Transfer-Encoding: chunked\r\n\r\n", *[chunks] * 10))
        return answers

    with ThreadPoolExecutor(FLOODS) as pool:
        return counted([each for found in pool.map(flood, range(FLOODS)) for each in found])


def stalled_readers(port: int) -> str:
    """13 streams that nobody reads, until their engines have finished or they are cut."""
    body = json.dumps({"prompt": [7] * 10, "max_tokens": STALLED_TOKENS, "stream": True}).encode()
    with ExitStack() as stack:
        for _ in range(STALLED):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.connect((HOST, port))
            client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(STALLED_TOKENS * 0.03 * SLOWDOWN / 2)
        started = time.monotonic()
        while (left := outstanding(port)) > STREAMS and time.monotonic() < started + 180:
            time.sleep(1)
    return f"{left - STREAMS:.0f} of {STALLED} counted at the end"


ATTACKS: tuple[Callable[[int], str], ...] = (
    headers,
    silent_connections,
    long_bodies,
    many_parts,
    tiny_chunks,
    stalled_readers,
)


def outstanding(port: int) -> float:
    """Return the sequences in flight, as the endpoint counts them."""
    text = httpx.get(f"http://{HOST}:{port}/metrics", timeout=30.0).text
    line = next(each for each in text.splitlines() if 'outstanding_requests{stage="all"}' in each)
    return float(line.split()[1])


def admitted(port: int) -> int:
    """Return how many of some small requests are answered."""
    body = {"prompt": [9] * 10, "max_tokens": 4}
    url = f"http://{HOST}:{port}/v1/completions"
    return sum(httpx.post(url, json=body, timeout=60.0).is_success for _ in range(OTHERS))


def attacked(attack: Callable[[int], str], port: int, watch: Watch) -> Outcome:
    """Run one attack in a process of low priority."""
    before = admitted(port)
    watch.reset()
    with multiprocessing.get_context("fork").Pool(1, initializer=_attacker) as pool:
        note = pool.apply(attack, (port,))
    time.sleep(1.0)
    return Outcome(
        attack=attack.__name__.replace("_", " "),
        growth_mib=round(watch.growth_bytes / 2**20, 1),
        health_ms=round(1e3 * watch.health_s, 1),
        gap_s=round(watch.gap_s / SLOWDOWN, 3),
        before=before,
        after=admitted(port),
        note=note,
    )


def _attacker() -> None:
    """Leave the processor to the endpoint, and end when the pool says so."""
    os.nice(19)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def deployed(place: Path, endpoints: int) -> tuple[int, list[psutil.Process]]:
    """Deploy the plan in *place*; return the endpoints' port and processes."""
    [port] = free_ports(1)
    typed(place, "sizing", "plan", *PLAN, "-o", "plan.json")
    engine = ("--engine", "simulated", "--slowdown", f"{SLOWDOWN:g}", "--port", str(port))
    typed(place, "serving", "up", "plan.json", *engine, "--endpoints", str(endpoints))
    pids = {
        socket_of.pid
        for socket_of in psutil.net_connections("tcp")
        if socket_of.laddr.port == port and socket_of.status == psutil.CONN_LISTEN
    }
    if len(pids) != endpoints:
        raise RuntimeError(f"{len(pids)} processes listen at port {port}; expected {endpoints}")
    return port, [psutil.Process(pid) for pid in pids]


def typed(place: Path, *words: str) -> None:
    """Run a command in *place*; its output is shown where it fails."""
    done = subprocess.run(  # noqa: S603  (our own commands)
        [str(BIN / words[0]), *words[1:]], cwd=place, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(words)}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def main() -> int:
    """Print a line for each attack; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--json", action="store_true", help="Print the outcomes as JSON.")
    parser.add_argument("--endpoints", type=int, default=1, help="Endpoint processes.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, terminable():
        place = Path(made)
        try:
            port, processes = deployed(place, given.endpoints)
            itl_s = read_plan(place / "plan.json").slo.itl_s or 0.0
            watch = Watch(port, processes)
            try:
                time.sleep(5.0)  # streams begin, and what is loaded once is loaded
                outcomes = [attacked(each, port, watch) for each in ATTACKS]
            finally:
                watch.end()
        finally:
            typed(place, "serving", "down")
    missed = [each for each in outcomes if not each.holds(itl_s)]
    if given.json:
        found = {"itl_s": itl_s, "attacks": [asdict(each) for each in outcomes]}
        print(json.dumps(found | {"missed": [each.attack for each in missed]}, indent=2))
    else:
        print("attack               memory MiB  /health ms  gap s (ITL)    others admitted  note")
        for each in outcomes:
            print(
                f"{each.attack:20} {each.growth_mib:10.1f}  {each.health_ms:10.1f}  "
                f"{each.gap_s:.3f} ({itl_s:g})  {each.before:3} then {each.after:3} of {OTHERS}  "
                f"{each.note}{'' if each not in missed else '  MISSED'}"
            )
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
