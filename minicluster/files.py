"""Reading text and tables, and writing files whole or not at all."""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from minicluster.errors import Fault, InputError, unreadable, unwritable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from io import FileIO
    from pathlib import Path

SURPLUS = "cells beyond the last column"  # column of a table under which these are


def read_text(path: Path, expectation: str) -> str:
    """Read a file in UTF-8, with or without a byte order mark, or refuse it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(str(path), unreadable(error), expectation) from None
    except UnicodeDecodeError:
        raise InputError(str(path), Fault("is not text in UTF-8"), expectation) from None


def read_table(
    path: Path, expectation: str, columns: Sequence[str], delimiter: str = ","
) -> list[tuple[str, dict[str, Any]]]:
    """
    Read a CSV file whose first line names the columns, those of *columns* among them.

    Returns: Each line: its place, as errors name it, and its cells by column. Cells beyond the last
    column are a list under `SURPLUS`, and cells missing at the end are `None`.

    Raises InputError: no such file, binary data, no CSV, a column missing, or two of one name.
    """
    text = io.StringIO(read_text(path, expectation), newline="")
    reader = csv.DictReader(text, restkey=SURPLUS, delimiter=delimiter, skipinitialspace=True)
    try:
        twice = next(
            (name for name, of in Counter(reader.fieldnames).items() if name and of > 1), ""
        )
        if twice:
            raise InputError(f"{path}: {twice}", Fault("is two columns"), "names that differ")
        for name in columns:
            if name not in (reader.fieldnames or ()):
                raise InputError(f"{path}: {name}", None, "a column of that name")
        return [(f"{path}:{reader.line_num}", line) for line in reader]
    except csv.Error as error:
        raise InputError(
            f"{path}:{reader.line_num}", Fault(f"is not CSV: {error}"), expectation
        ) from None


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file as `write_atomically` writes; cells of `None` are empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def write_atomically(path: Path, text: str) -> None:
    """
    Write *text* so that *path* holds it whole, or what it held before, also after a loss of power.

    A link stays a link. A pipe or a device (`/dev/stdout`) is written to: replacing it would take
    it from every other program.

    Raises InputError: the file cannot be written; nothing is left of it.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write files as `write_atomically` does: if one has no room, all stay as they were."""
    partials: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            if path.exists() and not path.is_file():
                path.write_text(text, encoding="utf-8", newline="")
                continue
            file = path.resolve()
            partials[path] = file.parent / f".{file.name}.{os.getpid()}"
            with partials[path].open("w", encoding="utf-8", newline="") as opened:
                opened.write(text)
                opened.flush()
                os.fsync(opened.fileno())
        for path, partial in partials.items():
            partial.replace(path.resolve())
    except OSError as error:
        raise InputError(str(path), unwritable(error), "a file that can be written") from None
    finally:
        for partial in partials.values():
            with suppress(OSError):
                partial.unlink()


def refuse_unwritable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    folder = path.parent
    if path.is_dir():
        raise InputError(str(path), Fault("is a folder"), "a file that can be written")
    if not folder.is_dir():
        raise InputError(
            str(path), Fault(f"is in no folder: {folder} is not there"), "in an existing folder"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(str(path), Fault("is not writable"), "a file that can be written")


def make_folder(folder: Path, place: str) -> None:
    """Make a folder, which errors name as that of *place*, and those above it, or refuse."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fault = Fault("is a file") if isinstance(error, FileExistsError) else unwritable(error)
        raise InputError(f"{place} {folder}", fault, "a writable folder") from None


@contextmanager
def locked(path: Path, place: str, user: str) -> Iterator[int]:
    """
    Keep every other process out of a lock until the end; the kernel frees that of a dead process.

    Args:
        path: file that holds the number of the process that has the lock; removed at the end.
        place: what is in use while the lock is taken, such as an option.
        user: what has it then, such as a command.

    Yields:
        The open file: a process that inherits it keeps the lock as long as it lives.

    Raises InputError: another process has the lock, or the file cannot be written.
    """
    with _open_lock(path, place, user) as opened:
        try:
            yield opened.fileno()
        finally:
            path.unlink(missing_ok=True)


def _open_lock(path: Path, place: str, user: str) -> FileIO:
    while True:
        try:
            # Without a buffer, which a full disk would keep from being flushed at the end.
            opened = path.open("ab+", buffering=0)
        except OSError as error:
            raise InputError(f"{place} {path}", unwritable(error), "a writable file") from None
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with opened:
                opened.seek(0)
                used = Fault(f"is in use by process {opened.read().decode().strip()} ({user})")
            way_out = "wait for it, or end it"
            raise InputError(place, used, "no other at the same time", way_out) from None
        # The one before may have removed the file between our opening and locking it.
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(opened.fileno())):
                break
        opened.close()
    with suppress(OSError):  # a full disk has no room for the number
        opened.truncate(0)
        opened.write(f"{os.getpid()}\n".encode())
    return opened
