"""The header that shows an API key."""

from __future__ import annotations

from minicluster.errors import InputError


def bearer(key: str, *, place: str) -> dict[str, str]:
    """
    Return the header that shows *key*.

    Args:
        key: without white space around it.
        place: where it was found, named in errors.

    Raises InputError: no header can hold it. What HTTP libraries raise would show the key.
    """
    if not key.isascii() or not key.isprintable():
        raise InputError(place, f"{len(key)} characters", "printable ASCII ones")
    return {"authorization": f"Bearer {key}"}
