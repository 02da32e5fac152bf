"""The API key of the endpoint: read from the environment, and written nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.http_client.authorization import bearer

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES = ("MINICLUSTER_API_KEY", "OPENAI_API_KEY")
"""Environment variables, of which the first that is set holds the key; empty means no key."""

DENIED = (401, 403)


def authorization(environment: Mapping[str, str], *, insecure: bool = False) -> dict[str, str]:
    """
    Return the header with the API key of *environment*; empty without a key.

    An endpoint whose certificate is not checked (*insecure*) gets no key, because any server may
    be behind it.

    Raises:
        InputError: the key cannot be in a header.
    """
    for variable in () if insecure else VARIABLES:
        if variable not in environment:
            continue
        key = environment[variable].strip()
        return bearer(key, place=variable) if key else {}
    return {}


def auth_hint(status: int) -> str:
    """Return what to append to the message of a 401 or 403; empty for any other *status*."""
    return f" ({VARIABLES[0]} has to contain a key of this endpoint)" if status in DENIED else ""
