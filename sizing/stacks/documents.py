"""Documents of YAML with each key once, their tables and lists, and the containers of pods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from minicluster.errors import Fault, InputError
from sizing.stacks.flags import positive, unknown
from sizing.stacks.script import Launch, engines_of_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sizing.stacks.shell import Value


class YamlTable(dict[Any, Any]):
    """A mapping of YAML, with the line that it begins on."""

    line = 0


class _Loader(yaml.SafeLoader):
    """A safe loader that takes no key twice."""


def _yaml_table(loader: _Loader, node: yaml.MappingNode) -> YamlTable:
    seen = set()
    for key, _ in node.value:
        if key.tag != "tag:yaml.org,2002:merge" and key.value in seen and key.id == "scalar":
            raise yaml.constructor.ConstructorError(
                None, None, f"{key.value} a second time", key.start_mark
            )
        seen.add(key.value if key.id == "scalar" else id(key))
    loader.flatten_mapping(node)
    mapping = YamlTable(loader.construct_mapping(node, deep=True))
    mapping.line = node.start_mark.line + 1
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _yaml_table)


def documents(text: str, place: str) -> list[Any]:
    """
    Return the documents of a YAML file that are not empty, with the items of lists of Kubernetes.

    Raises:
        InputError: no YAML, or a key that stands twice in one table.
    """
    try:
        loaded = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = place if mark is None else f"{place}:{mark.line + 1}"
        raise InputError(
            where, Fault(f"is no YAML: {problem or error}"), "YAML with each key once"
        ) from None
    kept: list[Any] = []
    for document in loaded:
        if isinstance(document, YamlTable) and document.get("kind") == "List":
            kept += rows(document, "items", place)
        elif document is not None:
            kept.append(document)
    return kept


def table(
    holder: Mapping[str, Any], key: str, place: str, expected: str = "a table"
) -> Mapping[str, Any]:
    """Return a table of a table; an empty one where there is none."""
    value = holder.get(key) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"{place}: {key}", value, expected)
    return value


def listed(holder: Mapping[str, Any], key: str, place: str) -> list[Any]:
    """Return a list of a table; an empty one where there is none."""
    value = holder.get(key) or []
    if not isinstance(value, list):
        raise InputError(f"{place}: {key}", Fault("is no list"), "a list")
    return value


def rows(holder: Mapping[str, Any], key: str, place: str) -> list[Mapping[str, Any]]:
    """Return a list of tables of a table; an empty one where there is none."""
    values = listed(holder, key, place)
    if not all(isinstance(value, Mapping) for value in values):
        raise InputError(f"{place}: {key}", Fault("is a list of other things"), "a list of tables")
    return values


def gpus_of(holder: Mapping[str, Any], place: str) -> int | None:
    """Return the GPUs that a pod asks for; `None`: it does not say."""
    resources = table(holder, "resources", place)
    for kind in ("limits", "requests"):
        for key, count in table(resources, kind, f"{place}: resources").items():
            if key in {"gpu", "nvidia.com/gpu", "amd.com/gpu"}:
                return positive(count, f"{place}: resources.{kind}.{key}")
            if re.search("gpu|mig|tpu|gaudi|neuron|npu|ascend", f"{key}".lower()):
                raise InputError(f"{place}: resources.{kind}", f"{key}", "GPUs")
    return None


def engines_of_container(
    container: Mapping[str, Any],
    place: str,
    notes: list[str],
    *,
    replicas: object = 1,
    variables: Sequence[Mapping[str, Any]] = (),
) -> list[Launch]:
    """
    Return the engines of a container of pods.

    Args:
        replicas: number of the pods, as it is written.
        variables: rows of the environment that stand outside of the container.
    """
    environment: dict[str, Value] = {}
    for row in [*variables, *rows(container, "env", place)]:
        name, value = row.get("name"), row.get("value")
        environment[f"{name}"] = unknown(f"${name}") if value is None else f"{value}"
    entry, args = (
        [re.sub(r"\$\((\w+)\)", lambda m: str(environment.get(m[1], unknown(m[0]))), f"{word}")
         for word in listed(container, key, place)]
        for key in ("command", "args")
    )  # fmt: skip
    count, gpus = positive(replicas, f"{place}: replicas"), gpus_of(container, place)
    image = f"{container.get('image')}"
    engines = engines_of_image(image, entry, args, environment, place, notes)
    return [replace(engine, replicas=engine.replicas * count, gpus=gpus) for engine in engines]
