"""How many requests each key has under way."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.api.api_keys import ApiKey


class ConcurrencyLimit:
    """Lets a key in as often as its limit allows at a time."""

    def __init__(self) -> None:
        """Start with nobody in."""
        self._inside: Counter[str] = Counter()

    def enter(self, key: ApiKey | None) -> bool:
        """Let a request in, if its key has room; without a key there is no limit."""
        if key is None:
            return True
        if key.max_ongoing is not None and self._inside[key.name] >= key.max_ongoing:
            return False
        self._inside[key.name] += 1
        return True

    def leave(self, key: ApiKey | None) -> None:
        """Let a request out that was let in."""
        if key is not None:
            self._inside[key.name] -= 1
