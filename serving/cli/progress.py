"""Progress lines of the commands that take long."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from minicluster.shell import talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a step: one moving line on a terminal, else a line per step."""
    if talk.is_terminal:
        with talk.status("") as line:
            yield line.update
        return
    printed: list[str] = []

    def report(text: str) -> None:
        if printed[-1:] != [text]:
            printed.append(text)
            talk.print(text, highlight=False, soft_wrap=True)

    yield report
