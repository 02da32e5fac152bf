"""Child processes that are waited for, and that end when we are interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minicluster.errors import Exit, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    Handler = Callable[[int, FrameType | None], None] | signal.Handlers

ENDINGS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def terminable() -> AbstractContextManager[None]:
    """Treat SIGTERM, and SIGHUP of a lost terminal, like Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    return _handled(ENDINGS, interrupt)


def uninterrupted() -> AbstractContextManager[None]:
    """Let nothing but SIGKILL end what stops and removes: a second Ctrl-C asks for no more."""
    return _handled((signal.SIGINT, *ENDINGS), signal.SIG_IGN)


@contextmanager
def postponed() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait, as a KeyboardInterrupt, for the end of a step."""
    interrupts: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)

    with _handled((signal.SIGINT, *ENDINGS), keep):
        yield
    if interrupts:
        raise KeyboardInterrupt


@contextmanager
def loading(name: str) -> Iterator[None]:
    """
    End at Ctrl-C with one line while what reads the command line is imported.

    Nothing has been started yet that would have to end, and an exception at any import would be
    shown with its traceback. What `run_child` started can be interrupted from here on.
    """

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        os.write(sys.stderr.fileno(), f"{name}: interrupted\n".encode())
        os._exit(Exit.INTERRUPTED)

    # A job in the background ignores SIGINT.
    ignores = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with nullcontext() if ignores else _handled((signal.SIGINT,), end):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield


def find_command(name: str) -> str:
    """Return the path of one of our commands, beside this Python or on the path, or refuse."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    path = beside or shutil.which(name)
    if path is None:
        raise InputError(name, None, f"the {name} command beside this Python", "run `make setup`")
    return path


def run_child(command: Sequence[str], **options: Any) -> int:  # noqa: ANN401  (Popen's own)
    """
    Run one of our programs to its end, and return its exit code.

    Ctrl-C, SIGTERM and SIGHUP reach it as one SIGINT, and then it has all the time it needs to
    stop what it started itself; `subprocess.run` would kill it after a quarter of a second. While
    its interpreter starts, which would show a traceback, the SIGINT waits for `loading`.

    Raises KeyboardInterrupt: this process got such a signal; the command has ended by now.
    """
    with terminable():
        child = None
        try:
            with _blocked(signal.SIGINT):  # the child inherits it
                # In a group of its own, or the terminal would signal it too, also while it stops.
                child = subprocess.Popen(command, process_group=0, **options)  # noqa: S603  (ours)
            return child.wait()
        except KeyboardInterrupt:
            with uninterrupted():
                if child is not None:
                    child.send_signal(signal.SIGINT)
                    child.wait()
            raise
