"""The command line of all three commands: streams, colours, errors and exit codes."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console

from minicluster.errors import (
    Exit,
    InputError,
    MiniclusterError,
    missing_package,
    unwritable,
)

USAGE_ERRORS: Any = typer.BadParameter.__mro__[2]
"""Click's root of everything wrong with a command line: newer Typers bring a Click of their own."""


class ErrorConsole(Console):
    """A console on stderr that falls silent if its reader is gone: the exit code stays ours."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Print nothing more; Rich would end the process with exit code 1."""
        self.quiet = True


HELP = ["-h", "--help"]

FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a disk, or a user's share of it, that is full: wherever they come, no bug of ours."""

COLLECTED_OBJECTS = 1_000_000
"""Objects made between two looks for cycles: a command ends before it has many."""

talk = ErrorConsole()
"""Console for messages, on stderr; data goes to stdout. No colour under NO_COLOR or a pipe."""


def run(app: typer.Typer, name: str) -> NoReturn:
    """
    Run a command line and exit with its code; see `minicluster.errors.Exit`.

    An expected error is one line on stderr, and under `--json` an object on stdout, too. Any other
    is our bug: its traceback is shown, exit code 1.
    """
    gc.set_threshold(COLLECTED_OBJECTS)
    command = typer.main.get_command(app)
    if f"_{name.upper()}_COMPLETE" in os.environ:
        command.main(prog_name=name, help_option_names=HELP)  # answers the shell, and exits
    try:
        # Not `app()`: Typer's own way to run makes exit code 130 of Ctrl-C, without a word.
        code = _invoke(command, name)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except MiniclusterError as error:
        _leave(_with_notes(f"{name}: {error}", error), error)
    except USAGE_ERRORS as error:
        message = error.format_message()  # empty where Click has just shown the help itself
        if not message:
            sys.exit(Exit.BAD_INPUT)
        used = error.ctx.command_path if error.ctx else name
        _leave(f"{name}: {message} (`{used} -h` shows how)", error, Exit.BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        say(_with_notes(f"{name}: interrupted", interrupt), style="red")
        sys.exit(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout has had enough; let the interpreter not complain while it exits.
        sys.stderr.close()
        sys.exit(Exit.DONE)
    sys.exit(code if isinstance(code, int) else Exit.DONE)


def _leave(message: str, error: BaseException, code: Exit | None = None) -> NoReturn:
    """Report an error, as JSON on stdout where that was asked for, and end with its exit code."""
    code = code if code is not None else getattr(error, "exit_code", Exit.BUG)
    if "--json" in sys.argv and not getattr(error, "answered", False):
        shown = {"kind": type(error).__name__, "message": message, "exit_code": int(code)}
        if isinstance(error, InputError):
            shown |= {"place": error.place, "expected": error.expectation, "hint": error.way_out}
        sys.stdout.write(json.dumps({"error": shown}, indent=2) + "\n")
    say(message, style="red")
    sys.exit(code)


def _invoke(command: Any, name: str) -> Any:  # noqa: ANN401
    try:
        with command.make_context(name, sys.argv[1:], help_option_names=HELP) as context:
            return command.invoke(context)
    except ModuleNotFoundError as error:
        missing = missing_package(error.name)
        if missing is None:
            raise
        raise missing from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        place = str(error.filename or "the disk")
        raise InputError(place, unwritable(error), "a disk that has room") from None


def _with_notes(line: str, error: BaseException) -> str:
    return "\n".join([line, *getattr(error, "__notes__", ())])


def say(line: str, *, style: str = "") -> None:
    """Print one line of words on stderr as they are: brackets of a path are no markup."""
    talk.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
