"""Files of `configs/`, and the error for a name that is not among them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable


def configs() -> Path:
    """Return the folder of the catalogs: inside an installed wheel, or beside the package."""
    inside = Path(__file__).parents[1] / "_configs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"


def files(kind: str) -> dict[str, Path]:
    """Return the files of one catalog (`models`, `gpus`, `scenarios`, …) by name, in order."""
    return {path.stem: path for path in sorted((configs() / kind).glob("*.toml"))}


def find_file(kind: str, name: str, *, place: str, expectation: str) -> Path:
    """
    Return the file of one catalog that *name* stands for, or the file at that path.

    Raises:
        InputError: neither; the nearest name is said.
    """
    shipped, path = files(kind), Path(name)
    if name in shipped:
        return shipped[name]
    if path.suffix == ".toml" or exists(path):
        return path
    raise unknown(place, name, expectation, shipped)


def exists(path: Path) -> bool:
    """Say whether a path exists; text that cannot be a path does not."""
    try:
        return path.exists()
    except OSError:
        return False


def unknown(place: str, name: str, expectation: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, with the name that was probably meant."""
    by_lower = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if near:
        return InputError(place, name, expectation, f"did you mean {by_lower[near[0]]}?")
    short = [key for key in by_lower.values() if "/" not in key and " " not in key]
    return InputError(place, name, expectation, "known: " + ", ".join(short or by_lower.values()))
