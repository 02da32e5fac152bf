"""Options that the studies of one scenario share, and how their commands answer and end."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from minicluster.errors import Exit
from sizing.cli.common import (
    AsJson,
    Calibration,
    Html,
    Jobs,
    Overrides,
    ScenarioFile,
    give_options,
    leave_interrupted,
    show,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from minicluster.pages.page import Page
    from sizing.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One scenario, and how its answer is wanted: the options of every study."""

    scenario: ScenarioFile
    as_json: AsJson = False
    overrides: Overrides = None
    calibration: Calibration = None
    html: Html = None
    jobs: Jobs = None

    def load(self, more: Sequence[str] = ()) -> Scenario:
        """Read the scenario with its overrides, and *more* of them."""
        from sizing.scenario import Scenario

        return Scenario.load(self.scenario, [*(self.overrides or []), *more], self.calibration)

    def answer(self, page: Callable[[], Page], data: object, *parts: RenderableType) -> None:
        """Write the page where one is asked for, and print the answer."""
        if self.html is not None:
            from minicluster.pages.write import write_page

            write_page(self.html, page())
        show(data, *parts, as_json=self.as_json, wide=True)

    @staticmethod
    def leave(*, found: bool, stopped: bool, so_far: str) -> None:
        """End with the exit code of an answer: interrupted (with *so_far*), negative or neither."""
        if stopped:
            leave_interrupted(so_far)
        if not found:
            raise typer.Exit(Exit.NEGATIVE)


def study(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Study`, in place of its first parameter."""
    hints = get_type_hints(Study, include_extras=True)
    shared = [
        inspect.Parameter(
            key.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if key.default is MISSING else key.default,
            annotation=hints[key.name],
        )
        for key in fields(Study)
    ]
    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    ]
    names = [each.name for each in shared]

    @wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401  (a command's options)
        asked = Study(**{name: given.pop(name) for name in names})
        command(asked, **given)

    first, *others = shared
    give_options(run, [first, *own, *others])
    return run
