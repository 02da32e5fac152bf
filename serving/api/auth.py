"""Access to the endpoint: API keys and their limits, its host names, and web origins."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from minicluster.errors import InputError
from minicluster.http_client.authorization import bearer
from serving.admission.controller import ANONYMOUS, KeyHolder
from serving.protocol.messages import refuse
from serving.request.length import read_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.requests import Request

KEYS = "MINICLUSTER_API_KEYS"
"""Environment variable: API keys, separated by lines or commas."""

KEYS_FILE = "MINICLUSTER_API_KEYS_FILE"
"""Environment variable: path of a file of keys, one per line; `#` begins a comment."""

ORIGINS = "MINICLUSTER_CORS_ORIGINS"
"""Environment variable: web origins, separated by commas, whose pages may use the endpoint."""

SHORTEST = 16
"""Fewest characters of a key: shorter ones can be guessed."""

HOSTS = "MINICLUSTER_HOSTS"
"""Environment variable: names, separated by commas, by which an endpoint without keys is called."""

ANY = "*"
"""Every origin, or every name."""


Keys = dict[bytes, KeyHolder]
"""The holder of each key by the key's SHA-256; the secrets themselves are not kept."""


def read_keys(environment: Mapping[str, str]) -> Keys:
    """
    Read the keys that *environment* holds or points to; none: the endpoint asks for no key.

    A line is `key`, `name:key` or `name:key:limit`, the limit a number of requests in progress.

    Raises:
        InputError: a file that cannot be read, a key that is too short, a limit that is no number,
            or a variable that is set and holds no key, which would open the endpoint by accident.
    """
    return dict(_key(line, place) for place, line in _lines(environment))


def refuse_open(host: str, environment: Mapping[str, str]) -> None:
    """
    Refuse an endpoint without keys that other machines can reach.

    Raises:
        InputError: *host* is not loopback, and *environment* names no keys; or as `read_keys`.
    """
    if not _is_loopback(host) and not read_keys(environment):
        raise InputError(
            "--host",
            host,
            "API keys for an endpoint that other machines can reach",
            f"{KEYS_FILE}=FILE in the environment, one key per line, or --open to serve without",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may be reachable


def authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """
    Return the header with which our own commands call the endpoint: the first key, if any.

    Raises:
        InputError: as `read_keys`, or a header cannot hold the key.
    """
    if not read_keys(environment):
        return {}
    place, line = next(_lines(environment))
    _, secret, _ = _parts(line, place)
    return bearer(secret, place=place)


def holder_of(keys: Keys, authorization: str | None) -> KeyHolder | None:
    """
    Return the holder of the key in an Authorization header, if it is one of *keys*.

    All keys are compared, each in constant time, so that the time reveals nothing about them.
    """
    scheme, _, secret = (authorization or "").partition(" ")
    digest = hashlib.sha256(secret.strip().encode()).digest()
    found = None
    for known, holder in keys.items():
        if hmac.compare_digest(known, digest) and scheme.lower() == "bearer":
            found = holder
    return found


def _lines(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every line that holds a key."""
    for variable in (KEYS, KEYS_FILE):
        value = environment.get(variable)
        if value is None:
            continue
        text = value.replace(",", "\n") if variable == KEYS else _text(value)
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
        lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
        if not lines:
            raise InputError(
                variable, "empty", "at least one key", "unset it to serve without keys"
            )
        for number, line in lines:
            yield f"{variable} line {number}", line


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(KEYS_FILE, path, f"a file of keys: {error}") from None


def _parts(line: str, place: str) -> tuple[str, str, str | None]:
    """Return the name, the secret and the limit of a line."""
    match line.split(":"):
        case [secret]:
            return "", secret, None
        case [name, secret]:
            return name, secret, None
        case [name, secret, limit]:
            return name, secret, limit
        case parts:
            raise InputError(place, f"{len(parts)} parts", "key, name:key or name:key:limit")


def _key(line: str, place: str) -> tuple[bytes, KeyHolder]:
    """Read one line: the key's digest and its holder; errors never show the key."""
    name, secret, limit = _parts(line, place)
    if len(secret) < SHORTEST:
        raise InputError(place, f"{len(secret)} characters", f"a key of at least {SHORTEST}")
    digest = hashlib.sha256(secret.encode()).digest()
    ongoing = None if limit is None else read_count(place, limit, "requests")
    return digest, KeyHolder(name=name or f"key-{digest.hex()[:6]}", max_ongoing=ongoing)


def names_in(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """Return the names that a variable lists, separated by commas."""
    return tuple(filter(None, map(str.strip, environment.get(variable, "").split(","))))


@dataclass(frozen=True, slots=True)
class AccessControl:
    """
    The checks before a request is parsed; without keys no request needs one.

    Attributes:
        keys: the holders of the keys.
        origins: web origins whose pages may use the endpoint.
        hosts: names by which an endpoint without keys may be called, in lower case.
    """

    keys: Keys
    origins: tuple[str, ...]
    hosts: tuple[str, ...] = ()

    def check_host(self, request: Request) -> None:
        """
        Refuse a name that others may have made for an endpoint without keys.

        A page of evil.example can let that name mean its visitor's loopback (DNS rebinding), and is
        then of the same origin as the endpoint. An address in the Host cannot be made so, and a key
        is not the page's to send.

        Raises:
            RequestRefused: 403.
        """
        host = request.headers.get("host", "")
        name = _netloc_name(host)
        if self.keys or ANY in self.hosts or name in {"", "localhost", *self.hosts}:
            return
        try:
            ip_address(name or "no address")
        except ValueError:
            message = (
                f"An endpoint without API keys is not called {host!r}: only localhost, its "
                f"address, its --host, and names that {HOSTS} lists."
            )
            refuse(403, message, code="host_not_allowed")

    def client(self, request: Request) -> KeyHolder:
        """
        Return the client of a request; anonymous where no key is needed.

        A browser sends some cross-site requests without a preflight, and names the site in Origin:
        without this check any page could use an endpoint on its user's loopback.

        Raises:
            RequestRefused: 401 without a key, 403 from a page of another site.
        """
        origin = request.headers.get("origin")
        if origin is not None and not {origin, ANY} & {*self.origins}:
            host = request.headers.get("host", "")
            if origin.lower().partition("://")[2] != host.lower():
                # Behind a proxy the Host may differ from the one that the page was loaded from.
                message = (
                    f"Pages of {origin} may not use this endpoint: only its own, and those of "
                    f"origins that {ORIGINS} names."
                )
                refuse(403, message, code="origin_not_allowed")
        if not self.keys:
            return ANONYMOUS
        found = holder_of(self.keys, request.headers.get("authorization"))
        if found is None:
            message = "A valid API key is needed: `Authorization: Bearer KEY`."
            refuse(401, message, code="invalid_api_key")
        return found


def _netloc_name(host: str) -> str | None:
    """Return the name in a Host header in lower case, `None` if there is none in it."""
    try:
        return urlsplit(f"//{host}").hostname if host else ""
    except ValueError:
        return None
