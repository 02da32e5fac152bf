"""The token of a Ray cluster: its processes refuse calls without it."""

from __future__ import annotations

import os
import secrets
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import InputError, unwritable
from minicluster.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Ray's own variables. Processes get the path, so that a list of processes shows no token."""

USE_TLS = "RAY_USE_TLS"
CERTIFICATES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")

TOKEN_ON_HOSTS = "/etc/minicluster-keys/ray-token"  # noqa: S105  (a path)
"""Default path of the token on each host of a cluster of several hosts."""


def write_token(file: Path) -> None:
    """Write a new random token into a file that only its owner may read."""
    write_private(file, secrets.token_hex(32))


def write_private(file: Path, text: str) -> None:
    """
    Write a secret into a file that only its owner may read.

    Raises:
        InputError: it cannot be written; nothing is left of it.
    """
    make_folder(file.parent, "serving")
    try:
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as private:
            private.write(text)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise InputError(str(file), unwritable(error), "a file that can be written") from None


def use_token(environ: MutableMapping[str, str], file: Path) -> None:
    """Make Ray use the token of *file*, and no other one."""
    environ.pop(TOKEN, None)  # Ray would prefer it
    environ[MODE] = "token"
    environ[TOKEN_PATH] = str(file.absolute())


def shared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every process of a cluster of several hosts needs."""
    tls = {name: environ[name] for name in (USE_TLS, *CERTIFICATES) if name in environ}
    return {MODE: "token", TOKEN_PATH: environ.get(TOKEN_PATH, TOKEN_ON_HOSTS), **tls}


def refuse_missing_token(environ: Mapping[str, str], address: str) -> None:
    """Raise InputError if Ray's own places hold no token for the cluster at *address*."""
    if environ.get(MODE, "token").lower() != "token" or environ.get(TOKEN):
        return
    path = environ.get(TOKEN_PATH)
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    try:
        if file.read_text(encoding="utf-8").strip():
            return
    except (OSError, ValueError):
        pass
    raise InputError(
        TOKEN_PATH,
        path,
        f"a file with the token of the Ray cluster at {address}",
        f"or {TOKEN}, or ~/.ray/auth_token",
    )


def refuse_missing_certificates(environ: Mapping[str, str]) -> None:
    """Raise InputError if Ray is to use TLS and a certificate or key is missing."""
    if environ.get(USE_TLS, "0").lower() not in {"1", "true"}:
        return
    for name in CERTIFICATES:
        file = environ.get(name)
        if not file or not Path(file).is_absolute() or not os.access(file, os.R_OK):
            raise InputError(
                name, file, "the absolute path of a file that can be read", f"or no {USE_TLS}"
            )


def channel_tls(environ: Mapping[str, str], *, listens: bool) -> ssl.SSLContext | None:
    """
    Return the TLS of the channels: by Ray's own certificates where Ray uses TLS.

    Both sides show the cluster's certificate, as Ray's processes do; its names are not compared,
    because replicas are called by addresses.
    """
    if environ.get(USE_TLS, "0").lower() not in {"1", "true"}:
        return None
    cert, key, ca = (environ[name] for name in CERTIFICATES)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key)
    context.load_verify_locations(ca)
    return context
