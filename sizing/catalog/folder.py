"""Files of `configs/`, and the error for a name that is not among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from minicluster.errors import InputError
from minicluster.specs.checks import meant, sibling

Entry = TypeVar("Entry")


def configs() -> Path:
    """Return the folder of the catalogs: inside an installed wheel, or beside the package."""
    inside = Path(__file__).parents[1] / "_configs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"


def files(kind: str, suffix: str = ".toml") -> dict[str, Path]:
    """Return the files of one catalog (`models`, `gpus`, `scenarios`, …) by name, in order."""
    return {path.stem: path for path in sorted((configs() / kind).glob(f"*{suffix}"))}


class Catalog(Mapping[str, Entry]):
    """The entries of one catalog by the names of their files, each read when it is asked for."""

    def __init__(self, kind: str, read: Callable[[Path], Entry]) -> None:
        """Find the files of *kind*, see `files`, of which *read* makes entries."""
        self._files, self._read = files(kind), read
        self._entries: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        """Return an entry; its file is read the first time."""
        if name not in self._entries:
            self._entries[name] = self._read(self._files[name])
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        """Say whether there is such a file."""
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._files)

    def __len__(self) -> int:
        """Count the files."""
        return len(self._files)


def find_profile(name: str) -> Path:
    """Return the file of a day's profile; raises as `find_file`."""
    expected = "a CSV file of a day, or the name of a shipped one"
    return find_file("profiles", name, place="--profile", expectation=expected, suffix=".csv")


def find_file(kind: str, name: str, *, place: str, expectation: str, suffix: str = ".toml") -> Path:
    """
    Return the file of one catalog that *name* stands for, or the file at that path.

    Raises:
        InputError: neither; the nearest name is said.
    """
    shipped, path = files(kind, suffix), Path(name)
    if name in shipped:
        return shipped[name]
    if path.suffix == suffix or exists(path):
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
    names = list(known)
    near = meant(name, names)
    if near is not None:
        return InputError(place, name, expectation, f"did you mean {near}?")
    short = [key for key in names if "/" not in key and " " not in key]
    other = sibling(name, names)
    asked = f"did you mean {other}? " if other is not None else ""
    return InputError(place, name, expectation, f"{asked}known: {', '.join(short or names)}")
