"""What the three commands do alike: streams, colours, errors and exit codes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console

from sizing.errors import Exit, MiniclusterError

if TYPE_CHECKING:
    import typer

talk = Console(stderr=True)
"""Where commands talk; data goes to stdout. Rich drops colour under NO_COLOR or a pipe."""


def run(app: typer.Typer, name: str) -> NoReturn:
    """
    Run a command line and leave with the exit code of architecture's table.

    What we foresaw is one line on stderr. What we did not is our bug: its traceback is shown,
    exit code 1.
    """
    try:
        code = app(standalone_mode=False, prog_name=name)
    except MiniclusterError as error:
        talk.print(f"{name}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show(sys.stderr)
        sys.exit(Exit.BAD_INPUT)
    except (KeyboardInterrupt, click.Abort):
        talk.print(f"{name}: interrupted", style="red")
        sys.exit(Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout has had enough; let the interpreter not complain while it exits.
        sys.stderr.close()
        sys.exit(Exit.DONE)
    sys.exit(code if isinstance(code, int) else Exit.DONE)
