"""YAML documents as they are written: each key once, and where each table begins."""

from __future__ import annotations

from typing import Any

import yaml

from minicluster.errors import InputError


class Table(dict[Any, Any]):
    """A mapping of YAML, with the line that it begins on."""

    line = 0


class _Loader(yaml.SafeLoader):
    """A safe loader that takes no key twice."""


def _table(loader: _Loader, node: yaml.MappingNode) -> Table:
    seen = set()
    for key, _ in node.value:
        if key.tag != "tag:yaml.org,2002:merge" and key.value in seen and key.id == "scalar":
            raise yaml.constructor.ConstructorError(
                None, None, f"{key.value} a second time", key.start_mark
            )
        seen.add(key.value if key.id == "scalar" else id(key))
    loader.flatten_mapping(node)
    found = Table(loader.construct_mapping(node, deep=True))
    found.line = node.start_mark.line + 1
    return found


_Loader.add_constructor("tag:yaml.org,2002:map", _table)


def documents(text: str, place: str) -> list[Any]:
    """
    Return the documents of a YAML file that are not empty; tables are `Table`.

    Raises:
        InputError: no YAML, or a key that stands twice in one table.
    """
    try:
        found = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = place if mark is None else f"{place}:{mark.line + 1}"
        raise InputError(where, problem or "no YAML", "YAML with each key once") from None
    return [each for each in found if each is not None]
