"""
Compiled modules of the simulation, used only where they were made from today's sources.

`make setup` compiles the modules of `SOURCES` as they are (scripts/compile_simulation.py) into a
folder of the Python environment that is named by the hash of these sources. Python imports them
from there if there is such a folder, and the sources otherwise: an edited source is never hidden
by what was compiled before the edit (ADR 17). Both give the same numbers; the compiled modules
take half the time.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

ROOT = Path(__file__).parents[1]  # folder that holds the packages

SOURCES = (
    "minicluster/engine_model/decode_batch.py",
    "minicluster/engine_model/interference.py",
    "minicluster/engine_model/kv_offload.py",
    "minicluster/engine_model/lockstep.py",
    "minicluster/engine_model/lora_slots.py",
    "minicluster/engine_model/prefix_cache.py",
    "minicluster/engine_model/replica.py",
    "minicluster/engine_model/request_table.py",
    "minicluster/engine_model/scheduler.py",
    "minicluster/engine_model/step_seconds.py",
    "minicluster/routing.py",
    "sizing/simulation/event_loop.py",
    "sizing/simulation/nics.py",
)
"""Modules in which a search spends nine tenths of its time. None of their values is pickled."""


def folder() -> Path:
    """Return the folder of modules compiled from the sources as they are now."""
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.encode() + b"\0" + (ROOT / path).read_bytes())
    return Path(sys.prefix) / "compiled" / digest.hexdigest()[:16]


class CompiledFinder:
    """Finds the modules that lie compiled in one folder (a `MetaPathFinder`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = [path.relative_to(folder) for path in folder.rglob(f"*{EXTENSION_SUFFIXES[0]}")]
        self.modules = {path.as_posix().split(".")[0].replace("/", ".") for path in files}

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where the module lies, or None where it is not one of the compiled."""
        if name not in self.modules:
            return None
        return PathFinder.find_spec(name, [str(self.folder.joinpath(*name.split(".")[:-1]))])


def use_compiled() -> bool:
    """Let Python import the compiled modules, and return whether there are any."""
    finder = CompiledFinder(folder())
    if finder.modules:
        sys.meta_path.insert(0, finder)
    return bool(finder.modules)
