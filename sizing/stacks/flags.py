"""Words of a command line as arguments of vLLM's server, by the table of its own parser."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from functools import cache
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from sizing.catalog.folder import configs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = "0.29.0"
"""Of the vLLM whose flags are known."""

UNKNOWN = "\ufffc"
"""Stands before and after a name in a text, such as a variable, of which no value is known."""

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""Of vLLM's human_readable_int; capital letters are powers of 1024, of whole numbers only."""


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return vLLM's flags by their first name: names, kind, choices and default of each."""
    path = configs() / "flags" / f"vllm-{VERSION}.toml"
    rows = tomllib.loads(path.read_text())["flags"]
    return {row["names"][0].removeprefix("--"): row for row in rows}


@cache
def effects() -> dict[str, Any]:
    """Return what is made of what is read into no scenario, `configs/flags/effects.toml`."""
    return tomllib.loads((configs() / "flags" / "effects.toml").read_text())


def arguments(words: Sequence[str], place: str, *, dynamo: bool = False) -> dict[str, Any]:
    """
    Return the arguments that a command line gives, by the names of vLLM's attributes.

    Short flags, beginnings of a flag, `--no-`, `=`, underscores and dotted names are what vLLM's
    parser makes of them; the model's attribute is `model`.

    Args:
        words: after `vllm serve`.
        dynamo: take the flags of `dynamo.vllm` as well.

    Raises:
        InputError: a flag that vLLM does not have, or a value of another kind.

    Source:
        vLLM 0.29.0 utils/argparse_utils.py, FlexibleArgumentParser, to which a test holds it.
    """
    parser = _parser(dynamo=dynamo)
    parser.place = place
    try:
        found, extra = parser.parse_known_args(_plain(words, place))
    except argparse.ArgumentError as error:
        expected = error.message.removeprefix("expected ")
        raise InputError(f"{place}: {error.argument_name}", None, expected) from None
    if extra:
        raise _unknown(extra[0], place)
    values = dict(vars(found))
    if "config" in values:
        way_out = "write its flags in the command"
        raise InputError(f"{place}: --config", values["config"], "no file of flags", way_out)
    named: str | None = values.pop("model_tag", None) or values.get("model")
    return values if named is None else values | {"model": named}


class _Parser(argparse.ArgumentParser):
    """vLLM's flags, with our errors; what no word gives is no argument."""

    place = ""

    def __init__(self) -> None:
        super().__init__(add_help=False, exit_on_error=False, argument_default=argparse.SUPPRESS)

    def error(self, message: str) -> Any:  # noqa: ANN401  (never returns)
        raise InputError(self.place, message, f"flags as vLLM {VERSION} takes them")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        if UNKNOWN not in str(value) and action.choices and value not in action.choices:
            expected = f"one of {', '.join(map(str, action.choices))}"
            raise InputError(f"{self.place}: {action.option_strings[0]}", value, expected)


@cache
def _parser(*, dynamo: bool) -> _Parser:
    parser = _Parser()
    parser.add_argument("model_tag", nargs="?")
    for row in table().values():
        _add(parser, row["names"], row["kind"], row)
    own = effects()["retired"] | (effects()["dynamo"] if dynamo else {})
    for name, kind in own.items():
        _add(parser, [f"--{name}"], kind, {})
    return parser


def _add(parser: _Parser, names: Sequence[str], kind: str, row: Mapping[str, Any]) -> None:
    if kind == "switch":
        parser.add_argument(*names, action="store_true")
    elif kind == "boolean":
        parser.add_argument(*names, action=argparse.BooleanOptionalAction)
    else:
        parser.add_argument(
            *names,
            type=lambda text: converted(text, kind, f"{parser.place}: {names[0]}"),
            nargs="+" if kind == "list" else row.get("nargs"),
            choices=row.get("choices"),
        )


def converted(text: str, kind: str, place: str) -> Any:  # noqa: ANN401  (of any kind)
    """Return a value of a kind of the table; a text with something unknown stays a text."""
    if UNKNOWN in text or kind in {"text", "list"}:
        return text
    try:
        if kind == "float":
            return float(text)
        if kind in {"config", "text_or_config"}:
            return json.loads(text) if kind == "config" or text.startswith("{") else text
        if kind == "tokens_or_auto" and text.strip().lower() in {"-1", "auto"}:
            return -1
        return int(text) if kind == "int" else _tokens(text)
    except ValueError:
        words = {"int": "a number", "float": "a number", "config": "a JSON object"}
        raise InputError(place, text, words.get(kind, "a number, or one such as 8k")) from None


def _tokens(text: str) -> int:
    """Return a number with a unit; raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if not found:
        return int(text)
    number, unit = found.groups()
    power = UNITS[unit.lower()]
    if unit.islower():
        return int(float(number) * power)
    return int(number) * int(1024 ** (len(str(power)) // 3))


def _plain(words: Sequence[str], place: str) -> list[str]:
    """Return words as argparse takes them: dashes in names, and dotted names as JSON."""
    plain: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            plain.append(word)
        elif word.startswith("-O"):
            level = value if equals else word[2:]
            plain += ["--optimization-level", *([level] if level else [])]
        elif "." in name and not re.match(r"-\d", name):
            if not equals and not rest:
                raise InputError(f"{place}: {name}", None, "a value")
            flag, *keys = name.split(".")
            text = value if equals else rest.pop(0)
            _nest(nested.setdefault(_dashed(flag), {}), keys, text, f"{place}: {name}")
        else:
            plain.append(_dashed(name) + equals + value)
    return [*plain, *(each for flag, of in nested.items() for each in (flag, json.dumps(of)))]


def _dashed(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _nest(into: dict[str, Any], keys: list[str], text: str, place: str) -> None:
    """Set the value of a dotted name; `key+` adds to a list."""
    *tables, last = keys
    for key in tables:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            raise InputError(place, text, f"no table in the value of {key}")
    if last.endswith("+"):
        into[last[:-1]] = [*into.get(last[:-1], []), *text.split(",")]
        return
    for read in (json.loads, _tokens, str):
        try:
            into[last] = read(text)
        except ValueError:
            continue
        return


def of_table(table_of_flags: Mapping[str, Any]) -> list[str]:
    """Return the words of arguments by name: `False` is the `--no-` of a flag that has one."""
    words: list[str] = []
    for name, value in table_of_flags.items():
        flag = _dashed(f"--{name}")
        if value is False:
            boolean = table().get(flag[2:], {}).get("kind") == "boolean"
            words += [f"--no-{flag[2:]}"] if boolean else []
        elif value is not None:
            texts = [] if value is True else value if isinstance(value, list) else [value]
            words += [flag, *(json.dumps(e) if isinstance(e, dict) else str(e) for e in texts)]
    return words


def only(given: Mapping[str, Any], name: str, where: str) -> None:
    """Refuse keys of a table that neither are read nor are known to have no effect."""
    known = effects()["keys"][name]
    more = sorted(set(map(str, given)) - set(known))
    if more:
        raise InputError(where, ", ".join(more), f"at most the keys {', '.join(known)}")


def _unknown(word: str, place: str) -> InputError:
    """Return the error for a word that is no flag, with the nearest flag."""
    if UNKNOWN in word:
        return undecided(word, place, "arguments")
    names = [name for row in table().values() for name in row["names"]]
    near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), names, n=1)
    expected = f"a flag of vLLM {VERSION}" + (f", such as {near[0]}" if near else "")
    way_out = "take it out if no prediction depends on it" if word.startswith("-") else None
    return InputError(f"{place}: an argument of the engine", word, expected, way_out)


def unknown(what: str) -> str:
    """Mark a name of which no value is known; an empty one is the mark alone."""
    return f"{UNKNOWN}{what}{UNKNOWN}" if what else UNKNOWN


def undecided(text: str, place: str, what: str) -> InputError:
    """Return the error for a value that the file does not decide."""
    shown = text.replace(UNKNOWN, "")
    expected = f"{what} that the file gives: what `{shown}` becomes is not known from it"
    return InputError(place, shown, expected, "write the value in its place")
