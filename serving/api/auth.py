"""What is checked before a request is read: origin, key, length of the body."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from serving.api.api_keys import key_of
from serving.protocol.refusal import Refusal
from serving.request.validation import MAX_BODY_BYTES, RequestRefused

if TYPE_CHECKING:
    from starlette.requests import Request

    from serving.api.api_keys import ApiKey

ORIGINS = "MINICLUSTER_CORS_ORIGINS"
"""Environment variable: web origins, apart by commas, whose pages may use the endpoint."""


class RequestChecks:
    """Lets in who has a key, unless there are none, and no web page but ours."""

    def __init__(
        self,
        keys: tuple[ApiKey, ...],
        origins: tuple[str, ...] = (),
        *,
        token_limit: int | None = None,
    ) -> None:
        """Keep the keys, the origins besides our own, and the most tokens of an answer."""
        self.token_limit = token_limit
        self._keys = keys
        self._origins = frozenset(origins)

    @property
    def locked(self) -> bool:
        """Whether a key is needed."""
        return bool(self._keys)

    def key(self, request: Request) -> ApiKey | None:
        """
        Return the key of a request; `None` where none is needed.

        A browser sends some cross-site requests without asking first, and names the site in
        Origin: without this check any page could use an endpoint on its visitor's loopback.

        Raises:
            Refused: 401 without a key, 403 from a page of another site.
        """
        origin = request.headers.get("origin")
        if origin is not None and origin not in self._origins:
            host = request.headers.get("host", "")
            if urlsplit(origin).netloc.lower() != host.lower():
                # A proxy may have put another Host there than the page was asked from.
                message = (
                    f"Pages of {origin} may not use this endpoint: only its own, and those of "
                    f"origins that {ORIGINS} names."
                )
                raise RequestRefused(
                    Refusal(status=403, message=message, code="origin_not_allowed")
                )
        if not self._keys:
            return None
        found = key_of(self._keys, request.headers.get("authorization"))
        if found is None:
            message = "A valid API key is needed: `Authorization: Bearer KEY`."
            raise RequestRefused(Refusal(status=401, message=message, code="invalid_api_key"))
        return found

    async def body(self, request: Request) -> bytes:
        """
        Read the body, and no more of it than is allowed.

        Raises:
            Refused: 413.
        """
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise RequestRefused(_too_long())
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise RequestRefused(_too_long())
        return b"".join(parts)


def _too_long() -> Refusal:
    """Return the refusal of a body."""
    return Refusal(status=413, message=f"The body exceeds {MAX_BODY_BYTES} bytes.", code="too_long")
