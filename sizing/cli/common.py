"""What the commands share: typed options, the scenario's inputs, progress and consoles."""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_type_hints

from typer import Argument, Exit, Option

from minicluster.errors import Exit as ExitCode
from minicluster.errors import InputError
from minicluster.files import refuse_unwritable
from minicluster.shell import say, talk
from minicluster.specs.checks import attribute_docs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.progress import Progress, Task

    from minicluster.pages.page import ChartRow, Section
    from minicluster.plan import Plan

ScenarioFile = Annotated[
    Path, Argument(help="Scenario file (TOML), or the name of a shipped scenario")
]
PlanFile = Annotated[Path, Argument(help="Plan file written by `sizing plan -o`")]
Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Scenario key to override; repeatable"),
]
Calibration = Annotated[
    Path | None, Option(help="Calibration file of this machine, from `sizing calibrate`")
]


def writable(path: Path | None) -> Path | None:
    """Refuse a result's file that cannot be written before the result is computed."""
    if path is not None:
        refuse_unwritable(path)
    return path


def out_file(what: str) -> Any:  # noqa: ANN401  (Typer's own type)
    """Return `-o`, the option of a file that can be written."""
    return Option("-o", "--out", help=what, callback=writable)


Html = Annotated[
    Path | None,
    Option(help="HTML page to write, one file", callback=writable),
]
AsJson = Annotated[bool, Option("--json", help="JSON output in place of tables")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="All tables, not only the answer")]
Jobs = Annotated[
    int | None,
    Option(min=1, help="Processes that compute; the answer is the same [default: every core]"),
]
Seed = Annotated[int, Option(help="Seed of arrivals, lengths and routing")]

MAX_REQUESTS = 10_000_000
"""Maximum requests per simulation: a run is bounded by counts, never by seconds."""

Item = TypeVar("Item")


def give_options(command: Callable[..., None], options: list[inspect.Parameter]) -> None:
    """Tell Typer the options of a command, in place of the parameters that it has."""
    signature = inspect.Signature(options)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}


def with_keys(spec: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Give a command one option for every key of *spec*, in place of its last parameter, `**keys`.

    The value of an absent option is `None`, whatever the key's default: a file may set it. The
    help says the default, and what the docstring of *spec* says of the key.

    Args:
        spec: a frozen dataclass; `a_key` becomes `--a-key`.
    """

    def shown(key: Field[Any]) -> str | bool:
        """Return the default of a key as the help says it; switches are off without a word."""
        known = key.default is not MISSING and key.default is not None
        return known and not isinstance(key.default, bool) and str(key.default)

    hints, texts = get_type_hints(spec), attribute_docs(spec)
    options = []
    for key in fields(spec):
        text = texts.get(key.name, "").removesuffix(".")
        said = Option(help=text[:1].upper() + text[1:] or None, show_default=shown(key))
        options.append(
            inspect.Parameter(
                key.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[hints[key.name] | None, said],
            )
        )

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        give_options(command, [*own, *options])
        return command

    return decorated


def with_overrides(plan: Plan, overrides: list[str], place: str) -> Plan:
    """
    Return a plan under another load or SLO; its pools stay.

    Raises:
        InputError: a key of what the plan deploys, or an impossible value.
    """
    from minicluster.config import scenario_tables
    from sizing.catalog.scenario import scenario_from

    for each in overrides:
        if each.partition("=")[0].strip().partition(".")[0] not in {"workload", "slo"}:
            raise InputError(
                "--set", each, "a key of [workload] or [slo]", "plan again to change the others"
            )
    if not overrides:
        return plan
    scenario, load = plan.inputs.scenario, plan.workload
    scenario = replace(scenario, workload=load.at_rate(load.requests_per_s))
    changed = scenario_from(scenario_tables(scenario), overrides, place=place)
    if changed.workload.has_users:
        expected = "a rate: the rate of users follows from a plan for them"
        raise InputError("--set", "workload.users", expected, "--users, or plan again")
    return replace(plan, inputs=replace(plan.inputs, scenario=changed))


@contextmanager
def naming(place: Path | str) -> Iterator[None]:
    """Put the file or option that holds a key before the key that an error names."""
    try:
        yield
    except InputError as error:
        raise error.inside(str(place)) from None


def leave_interrupted(what: str) -> NoReturn:
    """Say what an interrupted command has found so far, and end with its exit code."""
    say(f"interrupted: {what}", style="red")
    raise Exit(ExitCode.INTERRUPTED)


def tracked(items: Iterable[Item], what: str, *, total: int | None = None) -> Iterator[Item]:
    """Show a progress bar on stderr, on a terminal only, while *items* are taken."""
    with _bar() as bar:
        yield from bar.track(items, total=total, description=what)


def _bar() -> Progress:
    """Return a bar with counts and about how long the rest takes, on a terminal's stderr."""
    from rich.progress import BarColumn, Progress, ProgressColumn
    from rich.text import Text

    class Counts(ProgressColumn):
        """`12 of 27, about 40 s`."""

        def render(self, task: Task) -> Text:
            """Write the counts, and the rest where it is known."""
            if task.total is None:
                return Text("")
            left = "" if task.time_remaining is None else f", about {task.time_remaining:.0f} s"
            return Text(f"{task.completed:.0f} of {task.total:.0f}{left}")

    columns = ("{task.description}", BarColumn(), Counts())
    return Progress(*columns, console=talk, disable=not talk.is_terminal, transient=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, on a terminal only, that is told done and total."""
    with _bar() as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(data: object) -> None:
    """Write data, and nothing else, to stdout."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def show(data: object, *parts: Section | ChartRow | str, as_json: bool) -> None:
    """Write *data* as JSON to stdout, or the sections and lines for people that say the same."""
    if as_json:
        print_json(data)
        return
    from minicluster.pages.page import Section, Text
    from sizing.report.terminal import print_sections

    print_sections(Section("", (Text(part),)) if isinstance(part, str) else part for part in parts)
