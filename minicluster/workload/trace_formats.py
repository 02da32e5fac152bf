"""Formats of traces by their keys, and what keys mean in any of them: `trace_formats.toml`."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection


class Format(NamedTuple):
    """
    A format.

    Attributes:
        time_unit: of times that are numbers, by its documentation; `None`: it says none.
        block_tokens: tokens of the blocks of `hash_ids`; `None`: it has none.
        sure: its keys alone tell it from any other, so that its unit is certain.
        only_requests: every line is a request, in the order of arrival; else lines are sorted, and
            those without tokens (health checks, refused requests) left out.
    """

    title: str
    keys: list[str]
    document: str
    time_unit: str | None = None
    block_tokens: int | None = None
    sure: bool = False
    only_requests: bool = True


class Meaning(NamedTuple):
    """What a key says, by a name of the table; its rank among times; the unit in it."""

    what: str
    rank: int = 0
    unit: str | None = None


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FORMATS: dict[str, Format] = {name: Format(**each) for name, each in _TABLE["formats"].items()}
_WHAT: dict[str, Meaning] = {
    name: Meaning(what, rank)
    for what, names in _TABLE["keys"].items()
    for rank, name in enumerate(names)
}
_PART = re.compile(r"cache|detail|cost|price|limit|max")
"""Tables whose counts are parts of others, or no tokens of this request."""
_UNIT = re.compile(r"(?:_(s|sec|seconds|ms|millis|us|ns|unix_nano)|(Ms|Us|Ns|UnixNano))$")
_UNITS = {"sec": "s", "seconds": "s", "millis": "ms", "unix_nano": "ns", "unixnano": "ns"}


@cache
def meaning(path: str) -> Meaning | None:
    """Return what a dotted key means, `[]` after a list's; `None`: nothing that is read."""
    *tables, last = path.split(".")
    suffix = _UNIT.search(last)
    unit = suffix[0].removeprefix("_").lower() if suffix else ""
    bare = _WHAT.get(_plain(last[: suffix.start()] if suffix else last))
    own = _WHAT.get(_plain(last))
    if bare is not None and bare.what in {"time", "turns"}:
        own = bare._replace(unit=_UNITS.get(unit, unit) or None)
    of_table = _WHAT.get(f"{_plain(tables[-1])}.{_plain(last)}") if tables else None
    if of_table or own is None or own.what in {"images", "kind"}:
        return of_table or own
    is_part = own.what in {"prompt", "answer"} and _PART.search(".".join(tables).lower())
    # An id in a table is a user's, a model's, or of something else.
    return None if is_part or "[]" in path or (own.what == "id" and tables) else own


def format_of(keys: Collection[str]) -> Format:
    """Return the format that has these keys; any other is a log."""
    return next(form for form in FORMATS.values() if set(form.keys) <= set(keys))


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
