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
    """
    Yield, per fold, the items outside and inside it.

    Items of one key stay together; keys are dealt out in their order, so that those that begin
    alike are spread over all folds.
    """
    keys = [key(item) for item in items]
    number = {name: place % count for place, name in enumerate(sorted(set(keys)))}
    for fold in range(count):
        inside = [item for item, name in zip(items, keys, strict=True) if number[name] == fold]
        outside = [item for item, name in zip(items, keys, strict=True) if number[name] != fold]
        if inside:
            yield outside, inside
