"""How long commands of `serving` talk to a person."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from minicluster.shell import talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show what goes on: a moving line on a terminal, one line a step elsewhere."""
    if talk.is_terminal:
        with talk.status("") as line:
            yield line.update
        return
    said: list[str] = []

    def told(text: str) -> None:
        if said[-1:] != [text]:
            said.append(text)
            talk.print(text, highlight=False, soft_wrap=True)

    yield told
