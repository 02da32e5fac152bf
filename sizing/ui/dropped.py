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
    from collections.abc import Callable, Mapping

Read = TypeVar("Read")

UNSAID = ("engine.mean_accepted_tokens", "engine.kv_offload_host_bytes")
"""Fields of an engine that no deployment's file says."""
RATIO, RATIO_LABEL = "--characters-per-token", "Characters per token"
GROUPS = {"workload.": "load", "slo.": "limits", "cluster.": "GPUs"}
"""What a scenario needs beside a model and its engine, by the begin of the keys."""


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
    found = _as_file(content, name, read_deployed)
    said = {key: form.plain(value) for key, value in found.keys.items()}
    if form.PRESET in said:
        said |= form.preset_texts(said[form.PRESET])
    own = (key for key in texts if key.startswith(("model.", "engine.")) and key not in UNSAID)
    filled = dict.fromkeys(own, "")
    filled |= {f"today.{role}": found.pools.get(role, "") for role in form.TODAY}
    labels = {each.key: each.label for each in form.fields()}
    shown = [f"{labels[key]} {text}" for key, text in said.items() if key in labels]
    pools = " and ".join(f"{role} {size}" for role, size in found.pools.items())
    unsaid = [of for begin, of in GROUPS.items() if not any(key.startswith(begin) for key in said)]
    lines = [f"{name}: {pools}; {', '.join(shown)}"]
    lines += [f"not in it, so as the fields say: {', '.join(unsaid)}"] if unsaid else []
    filled |= {key: text for key, text in said.items() if key in labels}
    return filled | {form.NOTES[form.RUNNING]: "\n".join([*lines, *found.notes])}


def traffic_texts(content: bytes, name: str, characters_per_token: str) -> dict[str, str]:
    """
    Return the texts of fields that a log fills, as `sizing traffic` reads it.

    Args:
        name: as for `deployment_texts`.
        characters_per_token: as it was typed; empty: not given.

    Raises:
        InputError: a file of no known kind, or no number where one is needed.
    """
    ratio = toml_value(characters_per_token) if characters_per_token else None
    if not isinstance(ratio, int | float | None):
        raise InputError(RATIO_LABEL, characters_per_token, "a number", "English has 4")
    found = _as_file(content, name, lambda path: read_traffic(path, characters_per_token=ratio))
    filled = {f"workload.{key}": text for key, text in found.keys.items()}
    return filled | {form.NOTES[form.TRAFFIC]: "\n".join([f"{name}:", *found.lines()])}


def _as_file(content: bytes, name: str, read: Callable[[Path], Read]) -> Read:
    """Read what was dropped in as a file; errors name it as it was called."""
    with TemporaryDirectory(prefix="sizing-ui-") as folder:
        path = Path(folder) / "dropped"
        path.write_bytes(content)
        try:
            return read(path)
        except InputError as error:
            place = error.place.replace(str(path), name).replace(RATIO, RATIO_LABEL)
            raise InputError(place, error.value, error.expectation, error.way_out) from None
