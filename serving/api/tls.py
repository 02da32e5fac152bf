"""TLS of the endpoint: the server's certificate, and clients of our own that trust it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from minicluster.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The paths of a certificate chain and of its private key, both PEM."""

    cert: str
    key: str

    @property
    def changed_s(self) -> tuple[float, float]:
        """The times of their last changes; raises OSError if one is missing."""
        return Path(self.cert).stat().st_mtime, Path(self.key).stat().st_mtime

    def load(self, context: ssl.SSLContext) -> None:
        """Load both into *context*; raises OSError (`ssl.SSLError` is one) if they do not fit."""
        # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(self.cert, self.key, password="")


def tls_files(cert: Path | None, key: Path | None) -> TlsFiles | None:
    """
    Return the files of `--tls-cert` and `--tls-key`, by absolute paths, if both fit together.

    Raises:
        InputError: one is given without the other, cannot be read, or is no pair with the other.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        option_set, other = (
            ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        )
        raise InputError(option_set, str(cert or key), f"both, {other} too")
    files = TlsFiles(cert=str(cert.resolve()), key=str(key.resolve()))
    for option, path in (("--tls-cert", files.cert), ("--tls-key", files.key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise InputError(option, path, f"a file that can be read: {error.strerror}") from None
    try:
        server_context(files)
    except OSError as error:
        expected = f"PEM files of a certificate and of its key, without a password: {error}"
        raise InputError("--tls-cert, --tls-key", f"{files.cert}, {files.key}", expected) from None
    return files


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server with this certificate; raises OSError as `TlsFiles.load`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files.load(context)
    return context


def trusting(cert: str) -> ssl.SSLContext | None:
    """
    Return the context of a client that trusts this certificate file and no other.

    The name is not compared: our own commands call the endpoint by its `--host`, which a
    certificate for clients need not name. `None` for an endpoint without a certificate.

    Raises:
        OSError: the file cannot be read.
    """
    if not cert:
        return None
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # one that an authority signed, too
    return context
