"""The header that shows an API key."""

from __future__ import annotations

from minicluster.errors import InputError


def bearer(key: str, *, place: str) -> dict[str, str]:
    """Return the header that shows *key*, found at *place*, or refuse what no header can hold."""
    if not key.isascii() or not key.isprintable():
        raise InputError(place, f"{len(key)} characters", "printable ASCII ones")
    return {"authorization": f"Bearer {key}"}
