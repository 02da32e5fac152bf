"""Access to the endpoint: API keys, what each may do, host names and web origins."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import threading
import time
import tomllib
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from minicluster.errors import Fault, InputError
from minicluster.http_client.authorization import bearer
from serving.admission.controller import ANONYMOUS, RIGHTS, KeyHolder
from serving.protocol.messages import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from starlette.requests import Request

logger = logging.getLogger(__name__)

KEYS = "MINICLUSTER_API_KEYS"
"""Environment variable: API keys, one per line or separated by commas."""

KEYS_FILE = "MINICLUSTER_API_KEYS_FILE"
"""Environment variable: path of a file of keys, of lines as in `KEYS` or of TOML (`KeyTable`)."""

SHOWN_KEY = "MINICLUSTER_API_KEY"
"""Environment variable: the key that our commands show where the file holds only hashes."""

SHORTEST = 16
"""Fewest characters of a key: shorter ones can be guessed."""

LOOK_S = 1.0
"""Shortest time between two looks at the file of keys."""

READER = "api-keys"
"""Name of the thread that reads a changed file of keys."""

TABLE = re.compile(r"^\s*\[\[\s*keys\s*\]\]", re.MULTILINE)
"""What tells TOML from lines: no line with it is a key."""

FIELD = re.compile(r"[a-z_0-9]{1,15}")
"""Names of fields that errors show; anything else could be a secret at the wrong place."""

Keys = dict[bytes, KeyHolder]
"""The holder of each key by the key's SHA-256; the secrets themselves are not kept."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Secret = Annotated[str, StringConstraints(strip_whitespace=True, min_length=SHORTEST)]

ORIGINS = "MINICLUSTER_CORS_ORIGINS"
"""Environment variable: web origins, separated by commas, whose pages may use the endpoint."""

HOSTS = "MINICLUSTER_HOSTS"
"""Environment variable: names, separated by commas, by which an endpoint without keys is called."""

ANY = "*"
"""Every origin, or every name."""


class KeyTable(BaseModel, extra="forbid", strict=True, hide_input_in_errors=True):
    """
    A `[[keys]]` table: the key or its SHA-256 in hexadecimal digits, its tenant's name, its limits.

    Attributes are those of `KeyHolder`.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    key: Secret | None = Field(None, repr=False)
    key_sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    requests_per_s: Positive | None = None
    tokens_per_min: Positive | None = None
    max_concurrency: Annotated[int, Field(ge=1)] | None = None
    rights: Annotated[frozenset[Literal["timing", "internal"]], Field(strict=False)] = frozenset()
    share_cache: bool = False

    @model_validator(mode="after")
    def _one_key(self) -> KeyTable:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("expected either key or key_sha256")
        return self


class KeyTables(BaseModel, extra="forbid", strict=True, hide_input_in_errors=True):
    """A TOML file of keys."""

    keys: Annotated[list[KeyTable], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class _KeyEntry:
    """One key as it was read; *secret* is `None` where only its hash is known."""

    place: str
    digest: bytes
    holder: KeyHolder
    secret: str | None


def read_keys(environment: Mapping[str, str]) -> Keys:
    """
    Read the keys that *environment* holds or points to; none: the endpoint asks for no key.

    A line is `key`, `name:key` or `name:key:limit`, the limit a number of requests in progress;
    such keys have all rights. A file of TOML has a `KeyTable` for each key.

    Raises:
        InputError: a file that cannot be read, a key that is too short or there twice, a limit that
            is none, or a variable that is set and holds no key, which would open the endpoint by
            accident. It shows no part of a key.
    """
    return {entry.digest: entry.holder for entry in _entries(environment)}


class KeyStore:
    """The keys of an endpoint; a file of keys is read again when it has changed."""

    def __init__(
        self, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the keys of *environment*; raises InputError as `read_keys`."""
        variables = {KEYS, KEYS_FILE} & environment.keys()
        self._environment = {name: environment[name] for name in variables}
        self._clock = clock
        self._looked_s = clock()
        self._stamp = self._now_stamp()
        self._keys = read_keys(self._environment)
        self._reader: threading.Thread | None = None

    def current(self) -> Keys:
        """
        Return the keys of the file, which is looked at once per `LOOK_S`.

        A changed file is read in a thread, because one of many keys takes a second; until then, and
        after a file that cannot be used, which is logged once, the former keys are in force.
        """
        if KEYS_FILE in self._environment and self._clock() - self._looked_s >= LOOK_S:
            self._looked_s = self._clock()
            reads = self._reader is not None and self._reader.is_alive()
            if not reads and (stamp := self._now_stamp()) != self._stamp:
                self._stamp = stamp
                self._reader = threading.Thread(target=self._read_again, name=READER, daemon=True)
                self._reader.start()
        return self._keys

    def _read_again(self) -> None:
        try:
            self._keys = read_keys(self._environment)
        except InputError as error:
            logger.error("the former API keys stay in force: %s", error)  # noqa: TRY400
        else:
            logger.warning("%s was read again: %d keys", KEYS_FILE, len(self._keys))

    def _now_stamp(self) -> tuple[int, ...]:
        try:
            status = Path(self._environment.get(KEYS_FILE, "")).stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino


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
    Return the header with which our own commands call the endpoint, if it asks for a key.

    It has the first key that is not hashed, with all rights if there is one, else `SHOWN_KEY`'s.

    Raises:
        InputError: as `read_keys`, there is no key to show, or a header cannot hold it.
    """
    entries = _entries(environment)
    if not entries:
        return {}
    for entry in sorted(entries, key=lambda entry: entry.holder.rights < RIGHTS):
        if entry.secret is not None:
            return bearer(entry.secret, place=entry.place)
    if SHOWN_KEY not in environment:
        raise InputError(SHOWN_KEY, None, f"one of the keys, because {KEYS_FILE} has only hashes")
    return bearer(environment[SHOWN_KEY].strip(), place=SHOWN_KEY)


def holder_of(keys: Keys, authorization: str | None) -> KeyHolder | None:
    """
    Return the holder of the key in an Authorization header, if it is one of *keys*.

    It is looked up by its SHA-256: what the time of that tells about the digest of a key says
    nothing about the key, and digests that come ever nearer to it cannot be made.
    """
    scheme, _, secret = (authorization or "").partition(" ")
    return keys.get(_digest(secret.strip())) if scheme.lower() == "bearer" else None


def salted(body: dict[str, Any], client: KeyHolder, secret: bytes) -> dict[str, Any]:
    """
    Return a checked request whose prefixes in the engines' caches no other tenant finds.

    Else the time to first token would tell whether another tenant has sent the same text. A salt of
    the client's own divides its tenant's prefixes further; without the endpoint's *secret* another
    tenant's salt cannot be guessed.
    """
    if client.share_cache:
        return body
    tenant = json.dumps([client.name, body.get("cache_salt")]).encode()
    return {**body, "cache_salt": hmac.new(secret, tenant, hashlib.sha256).hexdigest()}


def _entries(environment: Mapping[str, str]) -> list[_KeyEntry]:
    by_digest: dict[bytes, _KeyEntry] = {}
    for variable in (KEYS, KEYS_FILE):
        if variable not in environment:
            continue
        value = environment[variable]
        text = value.replace(",", "\n") if variable == KEYS else _text(value)
        toml = variable == KEYS_FILE and (value.endswith(".toml") or TABLE.search(text))
        entries = list((_of_tables if toml else _of_lines)(text, variable))
        if not entries:
            raise InputError(
                variable, Fault("has no key"), "at least one key", "unset it to serve without keys"
            )
        for entry in entries:
            if by_digest.setdefault(entry.digest, entry) is not entry:
                raise InputError(entry.place, Fault("repeats a key"), "a key that is there once")
    return list(by_digest.values())


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(KEYS_FILE, path, f"a file of keys: {error}") from None
    except UnicodeDecodeError:
        raise InputError(KEYS_FILE, path, "a file of keys in UTF-8") from None


def _of_lines(text: str, variable: str) -> Iterator[_KeyEntry]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#"):
            yield _of_line([part.strip() for part in line.split(":")], f"{variable} line {number}")


def _of_line(parts: list[str], place: str) -> _KeyEntry:
    """Read `key`, `name:key` or `name:key:limit`; no error shows a part, which may be a secret."""
    if len(parts) > 3:  # noqa: PLR2004
        raise InputError(place, Fault(f"has {len(parts)} parts"), "key, name:key or name:key:limit")
    name, secret, *limits = parts if len(parts) > 1 else ("", *parts)
    if len(secret) < SHORTEST:
        fault = Fault(f"has a key of {len(secret)} characters")
        raise InputError(place, fault, f"one of at least {SHORTEST}")
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", limit) for limit in limits):
        expected = "name:key:limit with a number of requests, at least 1"
        fault = Fault("has a limit that is not one")
        raise InputError(place, fault, expected, "a key with a colon needs TOML")
    digest = _digest(secret)
    holder = KeyHolder(
        name=name or f"key-{digest.hex()[:6]}",
        max_concurrency=int(limits[0]) if limits else None,
    )
    return _KeyEntry(place, digest, holder, secret)


def _of_tables(text: str, variable: str) -> Iterator[_KeyEntry]:
    try:
        tables = KeyTables.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line \d+, column \d+|end of document", str(error))
        place = f"{variable}, {where[0]}," if where else variable
        raise InputError(place, Fault("is not TOML"), "[[keys]] tables") from None
    except ValidationError as error:
        raise _refused_table(error, variable) from None
    for number, table in enumerate(tables.keys, start=1):
        digest = _digest(table.key) if table.key else bytes.fromhex(table.key_sha256 or "")
        holder = KeyHolder(**table.model_dump(exclude={"key", "key_sha256"}))
        yield _KeyEntry(f"{variable} keys[{number}]", digest, holder, table.key)


def _refused_table(error: ValidationError, variable: str) -> InputError:
    """Name the first field at fault, and never its value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ""
    for part in first["loc"]:
        if isinstance(part, int):
            place += f"[{part + 1}]"
        else:
            place += f".{part}" if FIELD.fullmatch(part) else ".?"
    place = f"{variable} {place.removeprefix('.')}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if first["type"] == "missing":
        return InputError(place, None, "a value")
    if first["type"] == "extra_forbidden":
        return InputError(place, Fault("is unknown"), f"one of {', '.join(KeyTable.model_fields)}")
    return InputError(place, Fault("is not valid"), message.removeprefix("expected "))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def names_in(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """Return the names that a variable lists, separated by commas."""
    return tuple(filter(None, map(str.strip, environment.get(variable, "").split(","))))


@dataclass(frozen=True, slots=True)
class AccessControl:
    """
    The checks before a request is parsed; without keys no request needs one.

    Attributes:
        origins: web origins whose pages may use the endpoint.
        hosts: names by which an endpoint without keys may be called, in lower case.
    """

    keys: KeyStore
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
        if self.keys.current() or ANY in self.hosts or name in {"", "localhost", *self.hosts}:
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
        keys = self.keys.current()
        if not keys:
            return ANONYMOUS
        holder = holder_of(keys, request.headers.get("authorization"))
        if holder is None:
            message = "A valid API key is needed: `Authorization: Bearer KEY`."
            refuse(401, message, code="invalid_api_key")
        return holder


def require(right: str | None, client: KeyHolder) -> None:
    """Refuse a client whose key lacks *right*, if one is needed; raises RequestRefused: 403."""
    if right is not None and right not in client.rights:
        message = f"This key may not use this path: it lacks the right {right!r}."
        refuse(403, message, code="insufficient_permissions")


def _netloc_name(host: str) -> str | None:
    """Return the name in a Host header in lower case, `None` if there is none in it."""
    try:
        return urlsplit(f"//{host}").hostname if host else ""
    except ValueError:
        return None
