"""Halves and folds by name: the same on every machine, whatever else is in the file."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")


def fold_of(name: str, count: int) -> int:
    """Number of the fold that *name* belongs to, 0 to *count* - 1, by its SHA-256."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % count


def folds(
    items: Sequence[T], count: int, key: Callable[[T], str]
) -> Iterator[tuple[list[T], list[T]]]:
    """Yield, per fold, the items outside and inside it; items of one key stay together."""
    numbers = [fold_of(key(item), count) for item in items]
    for fold in range(count):
        inside = [item for item, number in zip(items, numbers, strict=True) if number == fold]
        outside = [item for item, number in zip(items, numbers, strict=True) if number != fold]
        if inside:
            yield outside, inside
