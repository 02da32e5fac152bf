"""The API key that the endpoint wants: in the environment, and written nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.http_client.authorization import bearer

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES = ("MINICLUSTER_API_KEY", "OPENAI_API_KEY")
"""Environment variables: the first that is set holds the key; empty, it says that there is none."""

DENIED = (401, 403)


def authorization(environment: Mapping[str, str], *, insecure: bool = False) -> dict[str, str]:
    """
    Return the header that shows the key of *environment*; none where there is no key.

    An endpoint whose certificate is not checked (*insecure*) is shown none: it may be anyone's.

    Raises:
        InputError: no header can hold it.
    """
    for variable in () if insecure else VARIABLES:
        if variable not in environment:
            continue
        key = environment[variable].strip()
        return bearer(key, place=variable) if key else {}
    return {}


def way_in(status: int) -> str:
    """Return what a message about *status* needs besides, if it is that a key is wanted."""
    return f" ({VARIABLES[0]} has to hold a key of this endpoint)" if status in DENIED else ""
