"""Writing files whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """
    Write *text* so that *path* holds it whole, or what it held before.

    Args:
        path: of the file; its folder exists. A link stays a link. A pipe or a device
            (`/dev/stdout`) is written to: replacing it would take it from every other program.
        text: written as UTF-8, line ends as they are.

    Raises:
        InputError: the file cannot be written; nothing is left of it.

    Ignores:
        Loss of power: the disk may keep the new name and not yet the text.
    """
    file = path.resolve()
    partial = file.parent / f".{file.name}.{os.getpid()}"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", newline="")
            return
        partial.write_text(text, encoding="utf-8", newline="")
        partial.replace(file)
    except OSError as error:
        raise InputError(str(path), error.strerror, "a file that can be written") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def refuse_unwritable(path: Path) -> None:
    """
    Refuse a file that cannot be written, before the work whose result it is to hold.

    Raises:
        InputError: it is a folder, its folder is not there, or this user may not write there.
    """
    folder = path.parent
    if path.is_dir():
        raise InputError(str(path), "a folder", "a file that can be written")
    if not folder.is_dir():
        raise InputError(str(path), f"in no folder: {folder} is not there", "an existing folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(str(path), "not writable", "a file that can be written")
