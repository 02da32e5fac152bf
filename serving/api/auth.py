"""Access to the endpoint: API keys, web origins, and the length of a body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from serving.admission.tenants import ANONYMOUS, KeyHolder
from serving.api.keys import KeyStore, holder_of
from serving.protocol.messages import refuse

if TYPE_CHECKING:
    from starlette.requests import Request

ORIGINS = "MINICLUSTER_CORS_ORIGINS"
"""Environment variable: web origins, separated by commas, whose pages may use the endpoint."""

MAX_BODY_BYTES = 8 << 20
"""Most bytes of a body: a prompt of about two million tokens."""


@dataclass(frozen=True, slots=True)
class AccessControl:
    """The checks before a request is parsed; without keys no request needs one."""

    keys: KeyStore
    origins: tuple[str, ...]

    def client(self, request: Request) -> KeyHolder:
        """
        Return the client of a request; anonymous where no key is needed.

        A browser sends some cross-site requests without a preflight, and names the site in Origin:
        without this check any page could use an endpoint on its user's loopback.

        Raises:
            RequestRefused: 401 without a key, 403 from a page of another site.
        """
        origin = request.headers.get("origin")
        if origin is not None and origin not in self.origins:
            host = request.headers.get("host", "")
            if urlsplit(origin).netloc.lower() != host.lower():
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


async def read_body(request: Request) -> bytes:
    """
    Read the body of a request, and no more of it than is allowed.

    Raises:
        RequestRefused: 413.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            refuse(413, f"The body exceeds {MAX_BODY_BYTES} bytes.", code="too_long")
    return bytes(body)
