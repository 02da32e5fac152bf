"""Endpoints over https: certificates are checked, and no key is shown to one that is not."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from loadtest.client.api_key import VARIABLES
from loadtest.client.chat import learn_chat
from loadtest.client.endpoint import served_models
from loadtest.run.run_config import RunLength
from minicluster.errors import Exit, TargetFailed
from tests.loadtest.command import FAST, answered, run
from tests.loadtest.sending import order, send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import ServerStarter

OURS, OPENAI = VARIABLES
KEY = "secret-of-the-tests-0123456789"
FEW = RunLength(num_requests=5, warmup_s=0)


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the keys of whoever runs the tests."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def certify(tmp_path: Path) -> Callable[[str], Path]:
    """Write self-signed certificates, each with its key in the same file."""

    def make(address: str) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
        now = dt.datetime.now(dt.UTC)
        named = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(named, critical=False)
            .sign(key, hashes.SHA256())
        )
        path = tmp_path / f"{address}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        return path

    return make


@contextmanager
def listener(certificate: Path) -> Iterator[tuple[str, list[str | None]]]:
    """Serve a list of models by TLS; yield the address, and the keys that requests showed."""
    keys: list[str | None] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """List the models."""
            keys.append(self.headers.get("authorization"))
            body = b'{"data": [{"id": "fake"}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  (its own name)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Say nothing of clients that went away."""

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with Server(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("address", "trusted"),
    [("127.0.0.1", False), ("192.0.2.1", True)],
    ids=["self-signed", "of another host"],
)
def test_a_certificate_that_does_not_hold_is_shown_no_key(
    certify: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    *,
    trusted: bool,
) -> None:
    """Neither the question for models nor the load goes on; the message names both ways out."""
    monkeypatch.setenv(OURS, KEY)
    certificate = certify(address)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with listener(certificate) as (host, keys):
        with pytest.raises(TargetFailed, match=r"certificate.*SSL_CERT_FILE.*--insecure"):
            served_models(host)
        found = send(order(host, FEW), tmp_path / "run")

    assert keys == []
    assert {s.outcome for s in found.samples} == {"refused"}
    assert all("CERTIFICATE_VERIFY_FAILED" in (s.detail or "") for s in found.samples)


def test_an_endpoint_that_is_not_checked_is_shown_no_key(
    certify: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--insecure` any certificate will do, and whatever is asked is asked without the key."""
    monkeypatch.setenv(OURS, KEY)
    with listener(certify("192.0.2.1")) as (host, keys):
        assert served_models(host, insecure=True) == ("fake",)
        with pytest.raises(TargetFailed):
            learn_chat(host, "fake", insecure=True)
        send(replace(order(host, FEW), insecure=True), tmp_path / "run")

    assert len(keys) > 5
    assert set(keys) == {None}


def test_a_trusted_endpoint_is_loaded_with_the_key(
    certify: Callable[[str], Path],
    start_server: ServerStarter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TLS answers are whole, and the run says that the reader stamped them."""
    certificate = certify("127.0.0.1")
    monkeypatch.setenv(OURS, KEY)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    host = start_server(**FAST, key=KEY, certificate=str(certificate))
    found = send(order(host), tmp_path)

    assert host.startswith("https://")
    assert served_models(host) == ("fake",)
    assert len(found.measured) == 60
    assert all(s.ok and s.output_tokens == 10 for s in found.measured)
    assert all(s.ttft_send_s >= 0.05 - 0.001 for s in found.measured)
    assert found.client.stamps == "reader"


def test_insecure_by_the_command(
    certify: Callable[[str], Path], start_server: ServerStarter, tmp_path: Path
) -> None:
    """A certificate of its own making is refused, and taken on request."""
    host = start_server(**FAST, certificate=str(certify("127.0.0.1")))
    refused = run(host, tmp_path / "refused", "--requests", "20")
    run(host, tmp_path / "run", "--requests", "20", "--insecure")

    assert refused.returncode == Exit.TARGET_FAILED
    assert "--insecure" in refused.stderr
    assert not (tmp_path / "refused").exists()
    assert len(answered(tmp_path / "run")) == 20


@pytest.mark.parametrize(
    ("host", "key", "says"),
    [("http://127.0.0.1:9", "", "only an https address"), ("https://127.0.0.1:9", KEY, OURS)],
)
def test_insecure_is_refused_where_it_makes_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, key: str, says: str
) -> None:
    """Without a certificate to take, and with a key that would go to anyone: exit 2, unseen."""
    monkeypatch.setenv(OPENAI, key)
    done = run(host, tmp_path / "out", "--insecure")

    assert done.returncode == Exit.BAD_INPUT
    assert "--insecure" in done.stderr
    assert says in done.stderr
    assert KEY not in done.stderr
