"""`sizing sweep`: a scenario planned for many values of its keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from minicluster.errors import Exit, InputError
from minicluster.pages.write import write_page
from minicluster.shell import talk
from sizing.cli.console import wide_console
from sizing.cli.inputs import read_inputs
from sizing.cli.plan import CALIBRATION, HTML, OVERRIDES  # noqa: TC001  (Typer reads them)
from sizing.planner.studies.answer import StudyAnswer, answered, data
from sizing.planner.studies.sweep import parse_key, points
from sizing.report.study import sweep_table
from sizing.report.study_pages import sweep_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sizing.planner.studies.sweep import Swept


def sweep(
    scenario: Annotated[Path, typer.Argument(help="TOML, or a shipped scenario")],
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V", help="workload.requests_per_s=1,2,5; repeatable"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print exactly the data")] = False,
    overrides: OVERRIDES = None,
    calibration: CALIBRATION = None,
    html: HTML = None,
) -> None:
    """Plan every combination of values of some keys; infeasible ones say why."""
    keys = [parse_key(each) for each in key or []]
    combinations = points(keys)
    read_inputs(scenario, overrides or [], calibration)  # what is wrong with all of them
    _check_keys(scenario, overrides or [], combinations)
    answers: list[StudyAnswer] = []
    try:
        for combination in track(
            combinations, "planning", console=talk, disable=not talk.is_terminal, transient=True
        ):
            chosen = [*(overrides or []), *combination]
            answers.append(_answer(scenario, chosen, " ".join(combination), calibration))
            if answers[-1].interrupted:
                break
    except KeyboardInterrupt:
        if not answers:
            raise
    stopped = len(answers) < len(combinations) or answers[-1].interrupted
    combinations = combinations[: len(answers)]
    if html is not None:
        write_page(html, sweep_page(str(scenario), keys, combinations, answers))
    _show(keys, combinations, answers, as_json=as_json)
    if stopped:
        talk.print("interrupted: the points so far", style="red")
        raise typer.Exit(Exit.INTERRUPTED)
    if not any(answer.plan for answer in answers):
        raise typer.Exit(Exit.NEGATIVE)


def _show(
    keys: Sequence[Swept],
    combinations: Sequence[tuple[str, ...]],
    answers: Sequence[StudyAnswer],
    *,
    as_json: bool,
) -> None:
    """Print the points as data, or as a table."""
    if not as_json:
        wide_console().print(sweep_table(keys, combinations, answers))
        return
    document = [
        {"values": dict(each.split("=", 1) for each in combination), **data(answer)}
        for combination, answer in zip(combinations, answers, strict=True)
    ]
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _answer(
    scenario: Path, overrides: list[str], label: str, calibration: Path | None
) -> StudyAnswer:
    """Plan one point; one that cannot be planned is an answer too."""
    try:
        inputs = read_inputs(scenario, overrides, calibration)
    except InputError as error:
        return StudyAnswer(label=label, refused=str(error))
    return answered(inputs, label, keep_refusals=True)


def _check_keys(
    scenario: Path, overrides: list[str], combinations: tuple[tuple[str, ...], ...]
) -> None:
    """Refuse a key that no value makes a scenario of: it is misspelt, not infeasible."""
    last: InputError | None = None
    for combination in combinations:
        try:
            read_inputs(scenario, [*overrides, *combination], None)
        except InputError as error:
            last = error
        else:
            return
    if last is not None:
        raise last
