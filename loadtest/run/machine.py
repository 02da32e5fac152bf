"""The machine that the load comes from, and the versions on it."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path


def versions(**more: str) -> dict[str, str]:
    """Name our version and Python's, and what *more* there is."""
    return {
        "minicluster": metadata.version("minicluster"),
        "python": platform.python_version(),
    } | more


def machine() -> str:
    """Name the processor and system."""
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {platform.system()} {platform.release()}"
