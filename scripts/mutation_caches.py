"""
A pytest plugin of scripts/mutants.py: every test computes by itself what is cached in a process.

Else only the first test that needs a cached value reaches the code that computes it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_caches: list[Any] = []
_lru_cache: Any = functools.lru_cache


def _kept(maxsize: Any = 128, typed: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002
    """Return what `functools.lru_cache` does, and keep every cache."""
    made = _lru_cache(maxsize, typed)
    if callable(maxsize):  # without parentheses
        _caches.append(made)
        return made

    def decorate(function: Callable[..., Any]) -> Any:  # noqa: ANN401
        _caches.append(made(function))
        return _caches[-1]

    return decorate


functools.lru_cache = _kept
functools.cache = _kept(maxsize=None)


def pytest_runtest_setup() -> None:
    """Clear all caches before a test."""
    for each in _caches:
        each.cache_clear()
