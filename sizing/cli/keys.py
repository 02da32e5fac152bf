"""Keys of a spec as options of a command."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def with_keys(
    spec: type[Any], helps: Mapping[str, str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Give a command one option for every key of *spec*, in place of its last parameter, `**keys`.

    An option that is not given is `None`, whatever the key's default: a file may say it.

    Args:
        spec: a frozen dataclass; `a_key` becomes `--a-key`.
        helps: what the help says, by key.

    """
    names = {key.name for key in fields(spec)}
    hints = get_type_hints(spec)

    def options() -> list[inspect.Parameter]:
        return [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[each | None, typer.Option(help=helps.get(name))],
            )
            for name, each in hints.items()
            if name in names
        ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
        signature = inspect.Signature([*own, *options()])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return command

    return decorated
