"""The endpoint before the load, where it answers what nobody asked for."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from loadtest.client.api_key import VARIABLES
from loadtest.client.endpoint import served_models
from minicluster.errors import TargetFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = b'{"data": [{"id": "fake"}]}'


@contextmanager
def endpoint(body: bytes, location: str | None = None) -> Iterator[tuple[str, list[str | None]]]:
    """Answer with *body*, or point to *location*; yield the address, and the keys shown."""
    keys: list[str | None] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer alike, whatever is asked."""
            keys.append(self.headers.get("authorization"))
            self.send_response(302 if location else 200)
            if location:
                self.send_header("location", location)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b"{}", b"no", b'{"data": [{}]}'],
    ids=["nested too deep", "none", "no JSON", "without names"],
)
def test_what_lists_no_models_is_said_to_be_none(body: bytes) -> None:
    """One line with the address, however wrong the answer is."""
    with endpoint(body) as (host, _), pytest.raises(TargetFailed, match=host):
        served_models(host)


def test_the_key_stays_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint that was named is shown the key; where it points to is not."""
    monkeypatch.setenv(VARIABLES[0], "secret-of-the-tests")
    with endpoint(MODELS) as (there, second), endpoint(b"", f"{there}/v1/models") as (host, first):
        assert served_models(host) == ("fake",)

    assert first == ["Bearer secret-of-the-tests"]
    assert second == [None]
