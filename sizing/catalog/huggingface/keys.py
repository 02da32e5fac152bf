"""The keys of one config, typed on the way out and named when they are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minicluster.errors import InputError


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one file (`place`), with what their family assumes where one is absent."""

    values: Mapping[str, object]
    defaults: Mapping[str, object]
    place: str

    def has(self, name: str) -> bool:
        """Say whether the key is there, in the file or by default."""
        return self.values.get(name, self.defaults.get(name)) is not None

    def count(self, name: str, otherwise: int | None = None) -> int:
        """Return a whole number; *otherwise* where the key is absent."""
        value = self.values.get(name, self.defaults.get(name, otherwise))
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(name, "a whole number, zero or more")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; false where the key is absent."""
        value = self.values.get(name, self.defaults.get(name, False))
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def sequence(self, name: str) -> list[object]:
        """Return a list; empty where the key is absent."""
        value = self.values.get(name, self.defaults.get(name, []))
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def refuse(self, name: str, why: str) -> None:
        """Refuse the model if the key is there and says more than nothing."""
        if self.values.get(name) not in (None, False, 0, [], {}):
            raise self.wrong(name, f"no such key: {why}")

    def wrong(self, name: str, expectation: str) -> InputError:
        """Return the error for a key."""
        return InputError(f"{self.place}: {name}", self.values.get(name), expectation)
