"""
Compile the simulation's modules with mypyc, which halves the time of a search (ADR 17).

    python scripts/compile_simulation.py

About twenty seconds; nothing where it was done for these sources. `minicluster/compiled.py` says
which modules, where to, and when they are used. Where they cannot be compiled, for want of a C
compiler or of Python's headers, the sources serve, and this says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from minicluster.compiled import ROOT, SOURCES, folder

TYPES = """
[mypy]
follow_imports = silent
[mypy-numpy.*,pydantic.*,rich.*,typer.*]
follow_imports = skip
"""
"""
mypy's settings: `make check` checks the types with the project's own. Types of our other modules
are followed, for an attribute of unknown type is slow; those of libraries are not, to compile fast.
"""


def build(work: Path) -> Path:
    """Compile the sources in a folder, and return where in it the modules lie."""
    from setuptools import Distribution  # noqa: PLC0415  (before mypyc, which brings its own)

    from mypyc.build import mypycify  # noqa: PLC0415  # isort: skip

    config = work / "mypy.ini"
    config.write_text(TYPES, encoding="utf-8")
    os.chdir(ROOT)
    modules = mypycify(
        ["--config-file", str(config), "--cache-dir", str(work), *SOURCES],
        opt_level="1",  # 2 compiles for three times as long, and saves a few per cent
        debug_level="0",
        target_dir=str(work / "c"),
    )
    distribution = Distribution({"name": "simulation", "ext_modules": modules})
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(work / "built"), str(work / "o")
    command.ensure_finalized()
    command.run()
    return work / "built"


def main() -> int:
    """Compile where that was not done; modules appear all at once, for others may start now."""
    target = folder()
    if target.is_dir():
        return 0
    # Imported here for a second `make setup`, which compiles nothing and takes no second.
    from setuptools.errors import CompileError, LinkError  # noqa: PLC0415

    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                built = build(Path(work))
        except (CompileError, LinkError) as error:
            print(
                f"setup: the simulation could not be compiled: {error}. It runs from its sources,"
                " and plans take twice as long; gcc and Python's headers (apt-get install gcc"
                " python3-dev), then `make setup`, mend it.",
                file=sys.stderr,
            )
            return 0
        with contextlib.suppress(OSError):  # compiled by another in the meantime
            built.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
