"""The endpoint's certificate: what is refused, and who trusts it."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from minicluster.errors import InputError
from serving.api.tls import tls_files, trusting
from serving.cluster.ports import LOOPBACK, free_ports, is_free
from serving.deployment.engine_args import DeployTarget
from serving.operations.deploy import Site
from tests.certificates import write_certificate
from tests.serving.command import taken_port


@pytest.mark.parametrize(
    ("cert", "key", "says"),
    [
        ("one", None, "--tls-cert is '.*one'; it has to be both, --tls-key"),
        (None, "one", "--tls-key is '.*one'; it has to be both, --tls-cert"),
        ("none", "one", "--tls-cert is '.*none'; it has to be a file that can be read"),
        ("one", "none", "--tls-key is '.*none'; it has to be a file that can be read"),
        ("one", "two", "it has to be PEM files of a certificate and of its key"),
        ("locked", "locked", "without a password"),
        ("text", "one", "it has to be PEM files"),
    ],
)
def test_files_that_are_no_certificate_and_its_key_are_refused(
    tmp_path: Path, cert: str | None, key: str | None, says: str
) -> None:
    for name in ("one", "two"):
        write_certificate(tmp_path / name, LOOPBACK)
    write_certificate(tmp_path / "locked", LOOPBACK, password=b"secret")
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(InputError, match=says):
        tls_files(tmp_path / cert if cert else None, tmp_path / key if key else None)


def test_our_own_commands_trust_that_certificate_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name is; its path holds in another directory, too."""
    write_certificate(tmp_path / "one", "192.0.2.1")
    monkeypatch.chdir(tmp_path)
    files = tls_files((tmp_path / "one").relative_to(tmp_path), tmp_path / "one")
    assert files is not None
    assert files.cert == str(tmp_path / "one")
    context = trusting(files.cert)
    assert context is not None
    assert context.cert_store_stats()["x509"] == 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, False)
    assert trusting("") is None
    assert tls_files(None, None) is None


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [("::1", False, "http://[::1]:80"), ("10.0.0.1", True, "https://10.0.0.1:80")],
)
def test_the_address_of_an_endpoint(tmp_path: Path, host: str, url: str, *, tls: bool) -> None:
    file = write_certificate(tmp_path / "one", LOOPBACK)
    files = tls_files(file, file) if tls else None
    site = Site(target=DeployTarget(kind="cpu"), host=host, port=80, tls=files)
    assert site.base_url == url


def test_ports_of_ipv6_are_found() -> None:
    """`serving up --host ::1` said of every port that it is taken."""
    [port] = free_ports(1, "::1")
    assert is_free("::1", port)
    with taken_port("::1") as taken:
        assert not is_free("::1", int(taken))
