"""The machine that the load comes from, and the versions on it."""

from __future__ import annotations

import platform
from importlib import metadata

from minicluster.machine import processor


def versions(**more: str) -> dict[str, str]:
    """Name our version and Python's, and what *more* there is."""
    return {
        "minicluster": metadata.version("minicluster"),
        "python": platform.python_version(),
    } | more


def machine() -> str:
    """Name the processor and system."""
    return f"{processor()}, {platform.system()} {platform.release()}"
