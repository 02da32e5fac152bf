"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest


def until(holds: Callable[[], bool], what: str, limit_s: float = 200.0) -> None:
    """
    Wait until something holds; fail after *limit_s* seconds, far more than it should take.

    What cannot be read or reached yet does not hold.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            if holds():
                return
        time.sleep(0.1)
    pytest.fail(f"not within {limit_s:g} s: {what}")
