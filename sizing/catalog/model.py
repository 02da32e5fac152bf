"""The catalog of models."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.errors import Fault, InputError
from minicluster.specs.checks import Spec, meant
from minicluster.specs.gpu import NumberSource
from minicluster.specs.model import DraftSpec, ModelSpec, with_weight_dtype
from sizing.catalog.folder import Catalog, exists
from sizing.catalog.huggingface.names import repackaged
from sizing.catalog.huggingface.reader import model_from, read_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.specs.scenario import ModelChoice

DEMO_MODEL = ".minicluster/models/demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Spec):
    """
    One file of `configs/models`.

    Attributes:
        hub_id: what a server loads.
        family: lineage of architectures that it belongs to (`Llama 3`); empty: none but its own.
        aliases: further hub ids of the same architecture.
        config: keys of the model's `config.json`.
        draft: a head for speculative decoding that is published apart from the model.
    """

    hub_id: str
    aliases: tuple[str, ...]
    config: dict[str, object]
    sources: tuple[NumberSource, ...]
    family: str = ""
    draft: DraftSpec | None = None


@cache
def models() -> Mapping[str, ModelEntry]:
    """Return the model catalog."""
    return Catalog("models", lambda path: parse(ModelEntry, read_toml(path), place=path.name))


def find_model(name: str, *, place: str = "model.id", drafts: bool = False) -> ModelSpec:
    """
    Return the model that *name* stands for.

    Args:
        name: a catalog name, a hub id, or a path to a `config.json` or to the directory it is in
            (relative to where the command runs). Instruct, chat, quantised and repackaged hub ids
            of any organisation stand for the entry of the same shapes, in the dtype that they name.
        drafts: whether the head that drafts tokens, if it has one, is loaded as well.

    Raises:
        InputError: neither in the catalog nor on disk, or a config that cannot be used.
    """
    found = _found_model(name, place)
    return found if drafts else replace(found, draft=None)


def _found_model(name: str, place: str) -> ModelSpec:
    known = _known_as(name)
    if known is not None:
        return _from_catalog(known[1], name, known[0])
    path = Path(name)
    if name and exists(path):
        directory = path if path.is_dir() else path.parent
        return model_from(
            read_config(path), name=directory.resolve().name, source=str(directory), place=name
        )
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        fault = Fault(f"is the file {name}, which does not exist")
        way_out = f"paths are relative to where the command runs; `make demo` makes {DEMO_MODEL}"
        raise InputError(place, fault, "a config.json or the directory it is in", way_out)
    other = repackaged(name, _model_names())
    if other is not None:
        return with_weight_dtype(_from_catalog(other.key, name, name), other.weight_dtype)
    expected = "a name or hub id of the catalog, or a directory with a config.json"
    near = meant(name, _model_names())
    way_out = f"did you mean {near}?" if near is not None else _how_to_get(name)
    raise InputError(place, name, expected, way_out)


def _how_to_get(name: str) -> str:
    """Say how a model that is not in the catalog is planned, and what is there of its family."""
    owner, slash, bare = name.rpartition("/")
    bare = re.sub(r"[^\w.-]", "", bare) or "NAME"
    url = f"https://huggingface.co/{owner if slash else 'OWNER'}/{bare}/raw/main/config.json"
    family = re.match(r"[a-z]*", bare.lower())
    alike = [key for key in models() if family and family[0] and key.startswith(family[0])]
    same = f"; of this name the catalog has {', '.join(alike)}" if alike else ""
    get = f"curl -fL --create-dirs -o {bare}/config.json {url}"
    return f"get the file: {get} and take model.id = {bare!r}{same}"


def _known_as(name: str) -> tuple[str, str] | None:
    """Return the catalog's spelling of a name or hub id, whatever its case, and its entry's key."""
    if name in models():  # a file's own name needs no other file
        return name, name
    names = _model_names().items()
    return next(((known, key) for known, key in names if known.lower() == name.lower()), None)


def _from_catalog(key: str, name: str, hub_id: str) -> ModelSpec:
    entry = models()[key]
    source = hub_id if "/" in hub_id else entry.hub_id
    model = model_from(entry.config, name=name, source=source, place=f"{key}.toml")
    return model if entry.draft is None else replace(model, draft=entry.draft)


def model_family(name: str) -> str:
    """
    Return the lineage of architectures that a model belongs to.

    Args:
        name: as for `find_model`. A model of no entry is a family of its own, by its name.
    """
    known = _known_as(name)
    if known is not None:
        return models()[known[1]].family or name
    other = repackaged(name, _model_names())
    key = other.key if other is not None else None
    return (models()[key].family if key is not None else "") or name


@cache
def _model_names() -> Mapping[str, str]:
    return {
        name: key for key, entry in models().items() for name in (key, entry.hub_id, *entry.aliases)
    }


def chosen_model(choice: ModelChoice, place: str, *, drafts: bool = False) -> ModelSpec:
    """Return the model with the scenario's dtypes and context; see `find_model` for *drafts*."""
    model = find_model(choice.id, place=f"{place}: model.id", drafts=drafts)
    model = with_weight_dtype(model, choice.weight_dtype)
    if choice.kv_dtype is not None:
        model = replace(model, kv_dtype=choice.kv_dtype)
    model = _assumed(model, choice.assumed_context_tokens, place)
    wanted = choice.max_context_tokens
    if wanted is None:
        return model
    if wanted > model.max_context_tokens:
        raise InputError(
            f"{place}: model.max_context_tokens",
            wanted,
            f"at most {model.max_context_tokens}, what {model.id} was made for",
            "for a RoPE-scaled variant give the path of its own config.json as model.id; to plan"
            " as if there were one, set model.assumed_context_tokens",
        )
    return replace(model, max_context_tokens=wanted)


def _assumed(model: ModelSpec, tokens: int | None, place: str) -> ModelSpec:
    """Raise the context beyond what the model was made for, because the scenario says so."""
    if tokens is None:
        return model
    if tokens <= model.max_context_tokens:
        where = f"{place}: model.assumed_context_tokens"
        expected = f"more than {model.max_context_tokens}, what {model.id} was made for"
        raise InputError(where, tokens, expected, "model.max_context_tokens shortens the context")
    return replace(model, max_context_tokens=tokens)
