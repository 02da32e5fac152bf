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
    from collections.abc import Callable, Iterable, Sequence

    from minicluster.pages.page import ChartRow, Section
    from sizing.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
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

    def answer(self, study: str, data: object, parts: Iterable[Section | ChartRow]) -> None:
        """Write the page of a *study* where one is asked for, and print the answer."""
        sections = list(parts)
        if self.html is not None:
            from minicluster.pages.write import write_page
            from sizing.report.tables import answer_page

            title, footer = f"{self.scenario}: {study}", f"sizing {study}"
            write_page(self.html, answer_page(sections, title=title, footer=footer))
        show(data, *sections, as_json=self.as_json)

    @staticmethod
    def leave(*, found: bool, stopped: bool, so_far: str) -> None:
        """End with the exit code of an answer: interrupted (with *so_far*), negative or neither."""
        if stopped:
            leave_interrupted(so_far)
        if not found:
            raise typer.Exit(Exit.NEGATIVE)


def study(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `StudyOptions`, in place of its first parameter."""
    hints = get_type_hints(StudyOptions, include_extras=True)
    first, *others = [
        inspect.Parameter(
            key.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if key.default is MISSING else key.default,
            annotation=hints[key.name],
        )
        for key in fields(StudyOptions)
    ]
    own = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for option in list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    ]

    @wraps(command)
    def run(**options: Any) -> None:  # noqa: ANN401  (a command's options)
        shared = StudyOptions(**{key.name: options.pop(key.name) for key in (first, *others)})
        command(shared, **options)

    give_options(run, [first, *own, *others])
    return run
