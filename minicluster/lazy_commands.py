"""Commands that are listed by a table, and imported when they run."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Commands = Mapping[str, Mapping[str, tuple[str, str]]]
    """Heading of the help to name of a command to `module:function` and its line of the help."""


def lazy_app(package: str, about: str, commands: Commands) -> typer.Typer:
    """
    Make an app whose help, completion and usage errors need no module of its commands.

    Args:
        package: the package of the commands' modules.
        about: what the app is for.
        commands: what the help lists; a `Typer` in place of a function has commands of its own.
    """
    modules = {name: where for listed in commands.values() for name, (where, _) in listed.items()}

    class LazyGroup(TyperGroup):
        """A command group that lists commands by the table, and imports the one that runs."""

        def __init__(self, **settings: Any) -> None:  # noqa: ANN401  (Typer's own)
            """Make a stand-in for each command, of which only name and help are used."""
            super().__init__(**settings)
            for heading, listed in commands.items():
                for name, (_, line) in listed.items():
                    self.add_command(TyperCommand(name, help=line, rich_help_panel=heading))

        def get_params(self, ctx: Any) -> Any:  # noqa: ANN401  (likewise)
            """Return the flags, which are off: to convert none at all, Typer imports pydantic."""
            flags = super().get_params(ctx)
            for flag in flags:
                flag.default = False
            return flags

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401  (likewise)
            """Return the command that the arguments name, imported, and the other arguments."""
            name, _, rest = super().resolve_command(ctx, args)
            command = None if name is None else imported(f"{package}.{modules[name]}", name)
            return name, command, rest

    app = typer.Typer(cls=LazyGroup, help=about, no_args_is_help=True)

    @app.callback(help=about)
    def listed(
        *,
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                help="Print the version and exit.",
                is_eager=True,
                callback=_print_version,
            ),
        ] = False,
    ) -> None:
        """Take no options of its own but the version's."""

    return app


def _print_version(value: bool | None) -> None:  # noqa: FBT001  (Typer's callbacks)
    if value:
        from importlib import metadata  # noqa: PLC0415  (50 ms that no other command needs)

        typer.echo(f"minicluster {metadata.version('minicluster')}")
        raise typer.Exit


def imported(where: str, name: str) -> Any:  # noqa: ANN401  (likewise)
    """Import the command, or the group of commands, at `module:attribute`."""
    module, _, attribute = where.partition(":")
    target = getattr(import_module(module), attribute)
    # Plain: Rich cuts long options, and takes words in brackets for markup.
    one = typer.Typer(rich_markup_mode=None)
    if isinstance(target, typer.Typer):
        one.add_typer(target, name=name)
    else:
        one.command(name=name)(target)
    command: Any = get_group(one).commands[name]
    for inner in getattr(command, "commands", {}).values():  # else Click cuts these lines
        inner.short_help = (inner.help or "").partition("\n\n")[0]
    return command


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of a dataclass as options, in place of its first parameter."""
    first, *parameters = inspect.signature(command, eval_str=True).parameters.values()
    cls = first.annotation
    hints, keys = get_type_hints(cls, include_extras=True), fields(cls)
    keys = tuple(sorted(keys, key=lambda key: key.name not in cls.__annotations__))
    parameters += [
        inspect.Parameter(
            key.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if key.default is MISSING else key.default,
            annotation=hints[key.name],
        )
        for key in keys
    ]
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

    @wraps(command)
    def run(**values: Any) -> None:  # noqa: ANN401  (a command's options)
        options = cls(**{key.name: values.pop(key.name) for key in keys})
        command(options, **values)

    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return run
