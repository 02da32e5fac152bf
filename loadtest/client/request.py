"""One request: send it, read its stream to the end, and classify the outcome."""

from __future__ import annotations

# isort: off
import gevent  # first: what follows imports a patched standard library
import gevent.socket
import gevent.ssl

# isort: on
import errno
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import geventhttpclient.client
from geventhttpclient.client import HTTPClient, HTTPClientPool
from geventhttpclient.response import HTTPParseError, HTTPSocketPoolResponse

from loadtest.client.endpoint import auth_hint, client_context
from loadtest.client.kernel_timestamps import Arrival, enable_timestamps, receive
from loadtest.client.stream import CompletionStream, StreamError, check_encoding
from minicluster.phases import HANDOFF, QUEUED_PREFILL, SUMS
from minicluster.workload.samples import Sample
from minicluster.workload.schedule import ScheduledRequest

if TYPE_CHECKING:
    from loadtest.run.job import Job

OK = 200
REDIRECTS = range(300, 400)
SHED = (429, 503)  # statuses of an endpoint that sheds load
CLOSING_S = 1.0  # time that a stream has to end after its last event; the connection is reused then

BLOCK_BYTES = 65536
SHORTEST_S = 1e-6
"""Shortest sleep that makes the event loop check its timers and sockets; after `sleep(0)` it may
first run dozens of other greenlets that also yielded."""

READS_PER_TURN = 4
"""Reads without a turn of the event loop: only a stream faster than its reader has more."""
TIMING = re.compile(r"([\w.-]+)\s*;[^,]*?dur=(\d+\.?\d*|\.\d+)(?![\d.])")
"""An entry of a `Server-Timing` header (W3C) with a duration in milliseconds."""

LAST_READ: ContextVar[Arrival] = ContextVar("LAST_READ")
"""Arrival of this greenlet's last read: a response that has ended no longer has its socket."""


class StampedSocket(gevent.socket.socket):  # type: ignore[misc]
    """A socket with kernel timestamps; TLS reads by itself and has none."""

    def __init__(self, *kind: int) -> None:
        super().__init__(*kind)
        enable_timestamps(self)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Read up to *size* bytes, and keep their arrival in `LAST_READ`."""
        received, arrival = receive(self, size, flags)
        LAST_READ.set(arrival)
        return received


class TlsSocket(gevent.ssl.SSLSocket):  # type: ignore[misc]
    """A TLS socket that a timeout or a kill in its handshake closes; gevent's own stays open."""

    def do_handshake(self) -> None:
        """Shake hands; a failure of any kind closes the connection."""
        try:
            super().do_handshake()
        except BaseException:
            self.close()
            raise


class FinalResponse(HTTPSocketPoolResponse):  # type: ignore[misc]
    """A response that keeps its connection after interim ones (100, 102, 103, any 1xx)."""

    def _on_message_complete(self) -> None:
        """Give the connection back, but not for an interim response: the final one follows."""
        if self.get_code() < OK:
            self.message_complete = True
        else:
            super()._on_message_complete()


# The library makes its responses by this name, and gives the connection back after the first 1xx.
geventhttpclient.client.HTTPSocketPoolResponse = FinalResponse


def connections(job: Job) -> HTTPClientPool:
    """Return clients for any number of streams: Locust's own have 10 connections, and queue."""

    def context(**_: object) -> gevent.ssl.SSLContext:
        made = client_context(gevent.ssl.SSLContext, insecure=job.insecure)
        made.sslsocket_class = TlsSocket
        return made

    return HTTPClientPool(
        concurrency=1_000_000,
        insecure=job.insecure,
        ssl_context_factory=context,
        connection_timeout=job.timeout_s,
        network_timeout=job.timeout_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTask:
    """One request, due at *due_s*, and all that sending it takes; *name* is its `x-request-id`."""

    request: ScheduledRequest
    due_s: float
    path: str
    body: bytes
    name: str
    http: HTTPClient
    timeout_s: float
    origin_s: float
    stream: CompletionStream
    headers: Mapping[str, str] = field(repr=False)

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.origin_s

    def send(self) -> Sample:
        """Send the request and read its stream; every outcome becomes a sample."""
        send_s = self.now()
        outcome, detail = "ok", None
        timings: dict[str, float] = {}
        try:
            with gevent.Timeout(self.timeout_s):
                self._follow(timings)
        except StreamError as error:
            outcome, detail = error.outcome, str(error)
        except gevent.Timeout:
            outcome, detail = "timeout", f"no end after {self.timeout_s:g} s"
        except gevent.GreenletExit:
            outcome, detail = "unfinished", None
        except Exception as error:  # noqa: BLE001  (an unforeseen error is a sample, too)
            outcome, detail = _broken(error), f"{type(error).__name__}: {error}"[:200]
        stream = self.stream
        return Sample(
            index=self.request.index,
            in_window=self.request.in_window,
            due_s=self.due_s,
            send_s=send_s,
            end_s=self.now(),
            asked_input_tokens=self.request.input_tokens,
            asked_output_tokens=self.request.output_tokens,
            input_tokens=stream.input_tokens,
            output_tokens=stream.output_tokens,
            chunk_s=tuple(stream.chunk_s),
            chunk_tokens=tuple(stream.chunk_tokens),
            outcome=outcome,
            detail=detail,
            phases_s=reported_phases(timings, stream.metrics_s),
            cached_tokens=stream.cached_tokens,
        )

    def _follow(self, timings: dict[str, float]) -> None:
        headers = {**self.headers, "x-request-id": self.name}
        response = self.http.request("POST", self.path, body=self.body, headers=headers)
        try:
            status = response.status_code
            if status != OK:
                raise _refusal(response)
            check_encoding(_header(response, "content-encoding"))
            self.stream.content_type = _header(response, "content-type")
            header = _header(response, "server-timing")
            timings |= {name: float(value) / 1e3 for name, value in TIMING.findall(header)}
            for received in _pieces(response):
                arrival = LAST_READ.get(None) or Arrival(time.monotonic(), by_kernel=False)
                self.stream.by_kernel &= arrival.by_kernel
                self.stream.receive(received, arrival.at_s - self.origin_s)
                if self.stream.done:
                    break
            self.stream.finish()
            # Read on to the end of the message, so that the connection can be reused.
            with gevent.Timeout(CLOSING_S, False):  # noqa: FBT003  (gevent's own signature)
                for _ in _pieces(response):
                    pass
        finally:
            response.release()


def _header(response: HTTPSocketPoolResponse, name: str) -> str:
    """Return a header's value; empty without one, and a list where it is there several times."""
    value = response.get(name, "")
    return value if isinstance(value, str) else ", ".join(value)


def _refusal(response: HTTPSocketPoolResponse) -> StreamError:
    status = response.status_code
    text = " ".join(bytes(response.read(200)).decode(errors="replace").split())
    if status in REDIRECTS:
        where = _header(response, "location") or "no Location"
        return StreamError("bad_status", f"{status} to {where[:200]}; redirects are not followed")
    outcome = "shed" if status in SHED else "bad_status"
    return StreamError(outcome, f"{status}{auth_hint(status)}: {text}")


def _pieces(response: HTTPSocketPoolResponse) -> Iterator[bytes]:
    """
    Yield the parts of the body as they arrive.

    The response's own `read` waits for the requested number of bytes, and its `readline` searches
    every line end separately, which takes a quarter of the time of an event.
    """
    buffer = response._body_buffer  # noqa: SLF001  (pinned; there is no public way to not wait)
    loop = gevent.get_hub().loop
    turn, read = loop.iteration, 0
    while True:
        if buffer:
            yield bytes(buffer)
            del buffer[:]
        if response.message_complete:
            return
        if read == READS_PER_TURN:
            gevent.sleep(SHORTEST_S)
            read = 0
        elif loop.iteration != turn:
            turn, read = loop.iteration, 0
        response.feed(response._sock.recv(BLOCK_BYTES))  # noqa: SLF001
        read += 1


def reported_phases(timings: Mapping[str, float], engine: Mapping[str, float]) -> dict[str, float]:
    """
    Return what the server says of its phases, by names of `minicluster.phases`.

    Args:
        timings: of the `Server-Timing` header; names that are not ours stay as they are.
        engine: vLLM's own times of the request in the engine that decoded it. Its
            `time_to_first_token` counts from being scheduled there: by it a hand-off splits into
            the fetch of the KV cache and the first step, and a prompt that this engine computed
            into queue and prefill.
    """
    phases_s = {name: t for name, t in {**timings, **engine}.items() if math.isfinite(t)}
    whole = HANDOFF if HANDOFF in phases_s else QUEUED_PREFILL
    if whole in phases_s and (step_s := phases_s.pop("time_to_first_token", None)) is not None:
        phases_s.pop("queue_time", None)
        before, last = SUMS[whole]
        step_s = min(step_s, phases_s[whole])
        phases_s |= {before: phases_s.pop(whole) - step_s, last: step_s}
    return phases_s


def _broken(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionResetError | BrokenPipeError | HTTPParseError):
        return "cut"
    if not isinstance(error, OSError):
        return "malformed"
    own = error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
    return "client" if own else "refused"
