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
        keys: of its records.
        told_by: further keys that tell it from others with these.
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
    told_by: tuple[str, ...] = ()
    sure: bool = False
    only_requests: bool = True


class Meaning(NamedTuple):
    """What a key says: `time`, or a name of the table; its rank among times; the unit in it."""

    what: str
    rank: int = 0
    unit: str | None = None


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FORMATS: dict[str, Format] = {name: Format(**each) for name, each in _TABLE["formats"].items()}
_TIMES: dict[str, int] = {name: rank for rank, name in enumerate(_TABLE["times"]["names"])}
_WHAT: dict[str, str] = {name: what for what, names in _TABLE["keys"].items() for name in names}
_PART = re.compile("cache|detail|cost|price|limit|max")
"""Tables whose counts are parts of others, or no tokens of this request."""
_UNIT = re.compile(r"(?:_(s|sec|seconds|ms|millis|us|ns|unix_nano)|(Ms|Us|Ns|UnixNano))$")
_UNITS = {"sec": "s", "seconds": "s", "millis": "ms", "unix_nano": "ns", "unixnano": "ns"}


@cache
def meaning(path: str) -> Meaning | None:
    """Return what a dotted key means; `None`: nothing that is read."""
    *tables, last = path.split(".")
    suffix = _UNIT.search(last)
    unit = suffix[0].removeprefix("_").lower() if suffix else ""
    bare = _plain(last[: suffix.start()] if suffix else last)
    if bare in _TIMES:
        return Meaning("time", _TIMES[bare], _UNITS.get(unit, unit) or None)
    both = f"{_plain(tables[-1])}.{_plain(last)}" if tables else ""
    what = _WHAT.get(_plain(last)) or _WHAT.get(both)
    if what is None and _WHAT.get(bare) == "turns":
        what = "turns"  # delay_ms
    if what in {"prompt", "answer"} and _PART.search(".".join(tables)):
        return None
    return Meaning(what) if what else None


def format_of(keys: Collection[str]) -> str:
    """Return the name of the format that has these keys; any other is a log."""
    return next(name for name, each in FORMATS.items() if {*each.keys, *each.told_by} <= set(keys))


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
