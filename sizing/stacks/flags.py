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
"""vLLM's version whose flags are read."""

UNKNOWN = "\ufffc"
"""Mark before and after a name, such as a variable's, whose value the file does not give."""

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""Units of vLLM's human_readable_int; capital letters are powers of 1024, of whole numbers only."""


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return vLLM's flags by their first name: names, kind, choices and default of each."""
    path = configs() / "flags" / f"vllm-{VERSION}.toml"
    rows = tomllib.loads(path.read_text())["flags"]
    return {row["names"][0].removeprefix("--"): row for row in rows}


@cache
def effects() -> dict[str, Any]:
    """Return `configs/flags/effects.toml`: what becomes of words that set no scenario key."""
    return tomllib.loads((configs() / "flags" / "effects.toml").read_text())


def arguments(words: Sequence[str], place: str, *, dynamo: bool = False) -> dict[str, Any]:
    """
    Return the arguments of a command line, by the names of vLLM's attributes.

    Short flags, beginnings of a flag, `--no-`, `=`, underscores and dotted names are what vLLM's
    parser makes of them; the model's attribute is `model`.

    Args:
        words: words after `vllm serve`.
        dynamo: whether the flags of `dynamo.vllm` are taken as well.

    Raises:
        InputError: a flag that vLLM does not have, or a value of another kind.

    Source:
        vLLM 0.29.0 utils/argparse_utils.py, FlexibleArgumentParser, to which a test holds it.
    """
    parser = _parser(dynamo=dynamo)
    parser.place = place
    try:
        namespace, extra = parser.parse_known_args(_plain(words, place))
    except argparse.ArgumentError as error:
        expected = error.message.removeprefix("expected ")
        raise InputError(f"{place}: {error.argument_name}", None, expected) from None
    if extra:
        raise _no_flag(extra[0], place)
    values = dict(vars(namespace))
    if "config" in values:
        way_out = "write its flags in the command"
        raise InputError(f"{place}: --config", values["config"], "no file of flags", way_out)
    named: str | None = values.pop("model_tag", None) or values.get("model")
    return values if named is None else values | {"model": named}


class _Parser(argparse.ArgumentParser):
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
    others = effects()["retired"] | (effects()["dynamo"] if dynamo else {})
    for name, kind in others.items():
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
            type=lambda text: _converted(text, kind, f"{parser.place}: {names[0]}"),
            nargs="+" if kind == "list" else row.get("nargs"),
            choices=row.get("choices"),
        )


def _converted(text: str, kind: str, place: str) -> Any:  # noqa: ANN401  (of any kind)
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if not match:
        return int(text)
    number, unit = match.groups()
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
    return [*plain, *(word for flag, of in nested.items() for word in (flag, json.dumps(of)))]


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


def flags(by_name: Mapping[str, Any]) -> list[str]:
    """Return words of arguments: `a_key` is `--a-key`, `False` a `--no-` flag, a table JSON."""
    words: list[str] = []
    for name, value in by_name.items():
        flag = _dashed(f"--{name}")
        if value is False:
            boolean = table().get(flag[2:], {}).get("kind") == "boolean"
            words += [f"--no-{flag[2:]}"] if boolean else []
        elif value is not None:
            parts = [] if value is True else value if isinstance(value, list) else [value]
            texts = (json.dumps(part) if isinstance(part, dict) else str(part) for part in parts)
            words += [flag, *texts]
    return words


def only(keys: Mapping[str, Any], name: str, where: str) -> None:
    """Refuse keys that `effects.toml` does not list under *name*."""
    allowed = effects()["keys"][name]
    others = sorted(set(map(str, keys)) - set(allowed))
    if others:
        raise InputError(where, ", ".join(others), f"at most the keys {', '.join(allowed)}")


def _no_flag(word: str, place: str) -> InputError:
    if UNKNOWN in word:
        return undecided(word, place, "arguments")
    names = [name for row in table().values() for name in row["names"]]
    near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), names, n=1)
    expected = f"a flag of vLLM {VERSION}" + (f", such as {near[0]}" if near else "")
    way_out = "take it out if no prediction depends on it" if word.startswith("-") else None
    return InputError(f"{place}: an argument of the engine", word, expected, way_out)


def unknown(name: str) -> str:
    """Return a name whose value is unknown, marked; of an empty one the mark alone."""
    return f"{UNKNOWN}{name}{UNKNOWN}" if name else UNKNOWN


def undecided(text: str, place: str, expected: str) -> InputError:
    """Return the error for a value that the file does not decide."""
    shown = text.replace(UNKNOWN, "")
    text = f"{expected} that the file gives: what `{shown}` becomes is not known from it"
    return InputError(place, shown, text, "write the value in its place")


def positive(value: object, place: str) -> int:
    """
    Return a whole number above 0, which may be a text.

    Raises:
        InputError: no such number.
    """
    try:
        number = int(f"{value}")
    except ValueError:
        number = 0
    if number < 1:
        if UNKNOWN in f"{value}":
            raise undecided(f"{value}", place, "a number")
        raise InputError(place, value, "a whole number from 1")
    return number
