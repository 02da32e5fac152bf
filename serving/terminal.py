"""How long commands of `serving` talk to a person, and how they take being told to end."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from sizing.shell import talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


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


@contextmanager
def terminable() -> Iterator[None]:
    """Treat being told to end, or losing the terminal, like Ctrl-C: stop what was started."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
