"""The endpoint before the load and under it: its models, its key and its certificate."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtest.client.chat import learn_chat
from loadtest.client.endpoint import VARIABLES, authorization, check_models, served_models
from loadtest.run.run_config import RunLength
from minicluster.errors import Exit, InputError, TargetFailed
from minicluster.workload.samples import read_samples
from tests.certificates import write_certificate
from tests.loadtest.command import FAST, ServerStarter, run
from tests.loadtest.sending import order, send

OURS, OPENAI = VARIABLES
KEY = "secret-of-the-tests-0123456789"
MODELS = b'{"data": [{"id": "fake"}]}'
FEW = RunLength(num_requests=5, warmup_s=0)


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the keys of the user who runs the tests."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def certify(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a self-signed certificate, with its key in the same file."""

    def make(address: str) -> Path:
        return write_certificate(tmp_path / f"{address}.pem", address)

    return make


@contextmanager
def endpoint(
    body: bytes = MODELS, location: str | None = None, certificate: Path | None = None
) -> Iterator[tuple[str, list[str | None]]]:
    """Answer all with *body*, or point to *location*; yield the address, and the keys shown."""
    keys: list[str | None] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("authorization"))
            self.send_response(302 if location else 200)
            if location:
                self.send_header("location", location)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  (its own name)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # clients that went away

    with Server(("127.0.0.1", 0), Answer) as server:
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http{'s' * bool(certificate)}://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b"{}", b'{"data": [{}]}'],
    ids=["nested too deep", "none", "without names"],
)
def test_what_lists_no_models_is_refused_by_its_address(body: bytes) -> None:
    with endpoint(body) as (host, _), pytest.raises(TargetFailed, match=host):
        served_models(host)


def test_adapters_are_the_other_models_that_are_listed() -> None:
    """In their order; too few of them for the load are refused."""
    listed = b'{"data": [{"id": "base"}, {"id": "red"}, {"id": "blue"}]}'
    with endpoint(listed) as (host, _):
        assert check_models(host, "base", adapters=2)[:2] == ("base", ("red", "blue"))
        assert check_models(host, "base")[1] == ()
        with pytest.raises(
            InputError, match=r"workload.lora_adapters is 3; it has to be at most 2"
        ):
            check_models(host, "base", adapters=3)


def test_a_redirect_does_not_get_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OURS, KEY)
    with endpoint() as (there, second), endpoint(b"", f"{there}/v1/models") as (host, first):
        assert served_models(host)[0] == ("fake",)

    assert first == [f"Bearer {KEY}"]
    assert second == [None]


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, None),
        ({OPENAI: KEY}, KEY),
        ({OPENAI: "another", OURS: f" {KEY}\n"}, KEY),
        ({OPENAI: KEY, OURS: ""}, None),
    ],
)
def test_the_first_variable_holds_the_key(environment: dict[str, str], shown: str | None) -> None:
    """Set and empty, ours keeps OpenAI's key from endpoints that it is not for."""
    assert authorization(environment) == ({"authorization": f"Bearer {shown}"} if shown else {})
    assert authorization(environment, insecure=True) == {}


def test_every_request_shows_the_key_and_no_file_holds_it(
    start_server: ServerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OURS, KEY)
    host = start_server(ttft_s=0.01, itl_s=0.001, key=KEY)
    done = run(host, tmp_path, "--requests", "30", "--api", "chat", "--processes", "2")
    samples = read_samples(tmp_path / "samples.jsonl")

    assert len(samples) >= 30, done.stderr
    assert all(s.ok for s in samples if s.in_window), done.stdout
    assert KEY not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "samples.jsonl", "client.json"} <= {path.name for path in files}
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_without_the_key_the_variable_is_named(
    start_server: ServerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the way in, and nothing written."""
    monkeypatch.setenv(OURS, "another-secret-0123456789")
    done = run(start_server(key=KEY), tmp_path / "out")

    assert done.returncode == Exit.TARGET_FAILED
    assert "401" in done.stderr
    assert OURS in done.stderr
    assert "another-secret" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("address", "trusted"),
    [("127.0.0.1", False), ("192.0.2.1", True)],
    ids=["self-signed", "of another host"],
)
def test_an_endpoint_whose_certificate_is_not_valid_gets_no_request(
    certify: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    *,
    trusted: bool,
) -> None:
    """The message names both ways out."""
    monkeypatch.setenv(OURS, KEY)
    certificate = certify(address)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with endpoint(certificate=certificate) as (host, keys):
        with pytest.raises(TargetFailed, match=r"certificate.*SSL_CERT_FILE.*--insecure"):
            served_models(host)
        found = send(order(host, FEW), tmp_path / "run")

    assert keys == []
    refused = [s for s in found.samples if s.outcome == "refused"]
    assert refused
    assert all("CERTIFICATE_VERIFY_FAILED" in (s.detail or "") for s in refused)
    assert {s.outcome for s in found.samples} <= {"refused", "unfinished"}


def test_an_endpoint_that_is_not_checked_gets_no_key(
    certify: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models, the chats that teach and the load are asked for without it."""
    monkeypatch.setenv(OURS, KEY)
    with endpoint(certificate=certify("192.0.2.1")) as (host, keys):
        assert served_models(host, insecure=True)[0] == ("fake",)
        with pytest.raises(TargetFailed):
            learn_chat(host, "fake", insecure=True)
        send(replace(order(host, FEW), insecure=True), tmp_path / "run")

    assert len(keys) > 5
    assert set(keys) == {None}


def test_a_timeout_in_a_tls_handshake_closes_the_connection(tmp_path: Path) -> None:
    """A socket that is left to the garbage collector is a warning, which fails this test."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        host = f"https://127.0.0.1:{silent.getsockname()[1]}"
        job = replace(order(host, FEW), insecure=True, timeout_s=0.5)
        found = send(job, tmp_path / "run")
        gc.collect()

    assert {s.outcome for s in found.samples} <= {"timeout", "unfinished"}


def test_a_trusted_endpoint_is_loaded_with_the_key(
    certify: Callable[[str], Path],
    start_server: ServerStarter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TLS answers are whole, and the reader timestamps them."""
    certificate = certify("127.0.0.1")
    monkeypatch.setenv(OURS, KEY)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    host = start_server(**FAST, key=KEY, certificate=str(certificate))
    found = send(order(host), tmp_path)

    assert served_models(host)[0] == ("fake",)
    assert len(found.measured) == 60
    assert all(s.ok and s.output_tokens == 10 for s in found.measured)
    assert all(s.ttft_send_s >= 0.05 - 0.001 for s in found.measured)
    assert found.client.stamps == "reader"


@pytest.mark.parametrize(
    ("host", "key", "reason"),
    [("http://127.0.0.1:9", "", "only an https address"), ("https://127.0.0.1:9", KEY, OURS)],
)
def test_insecure_is_refused_where_it_makes_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, key: str, reason: str
) -> None:
    """Without a certificate to accept, and with a key that would go to any server."""
    monkeypatch.setenv(OPENAI, key)
    done = run(host, tmp_path / "out", "--insecure")

    assert done.returncode == Exit.BAD_INPUT
    assert "--insecure" in done.stderr
    assert reason in done.stderr
    assert KEY not in done.stderr
