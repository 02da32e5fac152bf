"""A small disk, which a test fills."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A disk of 1 MB."""

    path: Path
    mounted: bool

    @contextmanager
    def full(self, room_bytes: int = 0) -> Iterator[None]:
        """
        Have no more room on it.

        Where this user may not mount a disk, what our own code writes by these calls finds none.
        """
        if not self.mounted:
            with ExitStack() as patched:
                for place in ("os.fsync", "shutil.copyfile", "pathlib.Path.write_text"):
                    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    patched.enter_context(patch(place, side_effect=full))
                yield
            return
        filling = self.path / "filling"
        try:
            with filling.open("wb", buffering=0) as opened:
                for size in (1 << 16, 1 << 12, 1):
                    while _fits(opened.fileno(), size):
                        pass
                opened.truncate(opened.tell() - room_bytes)
            yield
        finally:
            filling.unlink()


def _fits(file: int, size: int) -> bool:
    try:
        os.write(file, bytes(size))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return False
        raise
    return True


@contextmanager
def small_disk(place: Path) -> Iterator[SmallDisk]:
    """Have a new disk below *place*, if this user may mount one, and nothing of it afterwards."""
    path = place / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(path, mounted)
    finally:
        if mounted:
            # Lazily: a test may be in it still.
            subprocess.run(["umount", "--lazy", str(path)], check=True)
