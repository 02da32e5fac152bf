"""Who may use the endpoint: API keys from a file or the environment, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.http_client.authorization import bearer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KEYS = "MINICLUSTER_API_KEYS"
"""Environment variable: keys, one a line or apart by commas."""

KEYS_FILE = "MINICLUSTER_API_KEYS_FILE"
"""Environment variable: path of a file of keys, one a line; `#` begins a comment."""

SHORTEST = 16
"""Characters of a key: fewer can be guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """
    One key; the key itself is not kept.

    Attributes:
        name: for logs and metrics.
        digest: SHA-256 of the key.
        max_ongoing: requests that it may have under way; `None`: no limit of its own.
    """

    name: str
    digest: bytes
    max_ongoing: int | None = None


def read_keys(environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """
    Read the keys that *environment* holds or points to; none: everybody may come in.

    A line is `key`, `name:key` or `name:key:limit`, the limit a number of requests under way.

    Raises:
        InputError: a file that cannot be read, a key that is too short, a limit that is no number,
            or a variable that is set and holds no key, which would let everybody in.
    """
    return tuple(_key(line, place) for place, line in _lines(environment))


def refuse_open(host: str, environment: Mapping[str, str]) -> None:
    """
    Refuse an endpoint that others than this machine can reach and that asks for no key.

    Raises:
        InputError: *host* is not loopback, and *environment* names no keys; or as `read_keys`.
    """
    if not _is_loopback(host) and not read_keys(environment):
        raise InputError(
            "--host",
            host,
            "API keys for an endpoint that others can reach",
            f"{KEYS_FILE}=FILE in the environment, a key a line, or --open to let everybody in",
        )


def _is_loopback(host: str) -> bool:
    """Tell an address of this machine alone; names other than localhost are taken to be none."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """
    Return the header by which our own commands ask the endpoint: the first key, if there is one.

    Raises:
        InputError: as `read_keys`, or no header can hold the key.
    """
    if not read_keys(environment):
        return {}
    place, line = next(_lines(environment))
    return bearer(_secret(line), place=place)


def key_of(keys: tuple[ApiKey, ...], authorization: str | None) -> ApiKey | None:
    """
    Return the key that an Authorization header holds, if it is one of *keys*.

    Every key is compared, whichever fits, so that time says nothing about them.
    """
    kind, _, given = (authorization or "").partition(" ")
    digest = hashlib.sha256(given.strip().encode("utf-8", "surrogatepass")).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest) and kind.lower() == "bearer":
            found = key
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
            raise InputError(variable, "empty", "at least one key", "unset it to let everybody in")
        for number, line in lines:
            yield f"{variable} line {number}", line


def _text(path: str) -> str:
    """Read a file of keys."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(KEYS_FILE, path, f"a file of keys: {error}") from None


def _key(line: str, place: str) -> ApiKey:
    """Read one line; errors never show the key."""
    parts = line.split(":")
    if len(parts) > 3:  # noqa: PLR2004  (name, key, limit)
        raise InputError(place, f"{len(parts)} parts", "key, name:key or name:key:limit")
    secret = _secret(line)
    if len(secret) < SHORTEST:
        raise InputError(place, f"{len(secret)} characters", f"a key of at least {SHORTEST}")
    digest = hashlib.sha256(secret.encode()).digest()
    name = parts[0] if len(parts) > 1 and parts[0] else f"key-{digest.hex()[:6]}"
    limit = parts[2] if len(parts) == 3 else None  # noqa: PLR2004
    if limit is not None and (not limit.isascii() or not limit.isdigit() or int(limit) < 1):
        raise InputError(place, limit, "a number of requests, at least 1")
    return ApiKey(name=name, digest=digest, max_ongoing=int(limit) if limit else None)


def _secret(line: str) -> str:
    parts = line.split(":")
    return parts[0] if len(parts) == 1 else parts[1]
