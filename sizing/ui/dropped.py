"""Files that are dropped in, or pasted: read as the commands read them, for the page's fields."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from minicluster.config import toml_value
from minicluster.errors import InputError
from sizing.stacks.read import read_deployed
from sizing.stacks.traffic import read_traffic
from sizing.ui import form

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Read = TypeVar("Read")

UNSAID = (
    "engine.mean_accepted_tokens",
    "engine.kv_offload_disk_bytes",
    "engine.name",
    "engine.version",
)
"""Begins of the keys of an engine that no deployment's file says."""
RATIO, RATIO_LABEL = "--characters-per-token", "Characters per token"
GROUPS = {"workload.input_tokens": "load", "slo.": "limits", "cluster.": "GPUs"}
"""Names of what a scenario has beside a model and its engine, by the first table of the key."""


def deployment_texts(content: bytes, name: str, texts: Mapping[str, str]) -> dict[str, str]:
    """
    Return the texts of fields that a deployment of another stack fills, as `sizing read` reads it.

    Model and engine are those of the file; what it does not say of them is at its default.

    Args:
        name: of the file, for errors and for what is said of it.
        texts: of the fields so far.

    Raises:
        InputError: a file of no known kind, or one that contradicts itself.
    """
    deployed = as_file(content, name, read_deployed)
    read = {key: form.plain(value) for key, value in deployed.keys.items()}
    if form.PRESET in read:
        read |= form.preset_texts(read[form.PRESET])
    labels = {field.key: field.label for field in form.fields()}
    read = {key: text for key, text in read.items() if key in labels}
    engine = (key for key in texts if key.startswith(("model.", "engine.")))
    own = (key for key in engine if not key.startswith(UNSAID))
    pools = {f"today.{role}": deployed.pools.get(role, "") for role in form.TODAY}
    layout = " and ".join(f"{role} {size}" for role, size in deployed.pools.items())
    lines = [f"{name}: {layout}; {', '.join(f'{labels[key]} {read[key]}' for key in read)}"]
    unsaid = [of for begin, of in GROUPS.items() if not any(key.startswith(begin) for key in read)]
    lines += [f"not in it, so as the fields say: {', '.join(unsaid)}"] if unsaid else []
    filled = dict.fromkeys(own, "") | pools | read
    return _filled(form.RUNNING, [*lines, *deployed.notes], filled, texts)


def traffic_texts(
    content: bytes, name: str, characters_per_token: str, texts: Mapping[str, str]
) -> dict[str, str]:
    """
    Return the texts of fields that a log fills, as `sizing traffic` reads it.

    Args:
        name, texts: as for `deployment_texts`.
        characters_per_token: as it was typed; empty: not given.

    Raises:
        InputError: a file of no known kind, or no number where one is needed.
    """
    ratio = toml_value(characters_per_token) if characters_per_token else None
    if not isinstance(ratio, int | float | None):
        raise InputError(RATIO_LABEL, characters_per_token, "a number", "English has 4")
    traffic = as_file(content, name, lambda path: read_traffic(path, characters_per_token=ratio))
    without = dict.fromkeys(("input_tokens", "output_tokens", "lengths"), "")
    filled = {f"workload.{key}": text for key, text in (without | traffic.keys).items()}
    return _filled(form.TRAFFIC, [f"{name}:", *traffic.lines()], filled, texts)


def _filled(
    group: str, lines: Sequence[str], filled: dict[str, str], texts: Mapping[str, str]
) -> dict[str, str]:
    """Add what a file said; where it has a rate, that is in place of users and of classes."""
    noted = filled | {form.NOTES[group]: "\n".join(lines)}
    if "workload.requests_per_s" not in filled:
        return noted
    cached = {"workload.prefix_tokens": texts.get("workload.prefix_tokens") or "0"}
    return noted | cached | {form.CLASSES: "", "workload.users": "", "workload.think_s": "0"}


def as_file(content: bytes, name: str, read: Callable[[Path], Read]) -> Read:
    """Read what was dropped in as a file; raises as *read*, naming it as it was called."""
    with TemporaryDirectory(prefix="sizing-ui-") as folder:
        path = Path(folder) / "dropped"
        path.write_bytes(content)
        try:
            return read(path)
        except InputError as error:
            place = error.place.replace(str(path), name).replace(RATIO, RATIO_LABEL)
            raise InputError(place, error.value, error.expectation, error.way_out) from None
