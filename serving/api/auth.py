"""Access to the endpoint: API keys and their rights, its host names, and web origins."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from serving.admission.tenants import ANONYMOUS, KeyHolder
from serving.api.keys import KeyStore, holder_of
from serving.protocol.messages import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

ORIGINS = "MINICLUSTER_CORS_ORIGINS"
"""Environment variable: web origins, separated by commas, whose pages may use the endpoint."""

HOSTS = "MINICLUSTER_HOSTS"
"""Environment variable: names, separated by commas, by which an endpoint without keys is called."""

ANY = "*"
"""Every origin, or every name."""


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
        found = holder_of(keys, request.headers.get("authorization"))
        if found is None:
            message = "A valid API key is needed: `Authorization: Bearer KEY`."
            refuse(401, message, code="invalid_api_key")
        return found


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
