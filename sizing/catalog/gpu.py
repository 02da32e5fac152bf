"""The catalog of GPUs, with what collective libraries take on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.specs.gpu import CollectiveEntry, Collectives, GpuSpec
from sizing.catalog.folder import Catalog, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntry:
    """
    One file of `configs/gpus`: a GPU and the other names it goes by.

    Attributes:
        generation: architecture, whose kernels GPUs share (`Hopper`); empty: not said.
    """

    spec: GpuSpec
    generation: str = ""
    aliases: tuple[str, ...] = field(default=())


@cache
def gpus() -> Mapping[str, GpuEntry]:
    """Return the GPU catalog."""
    return Catalog("gpus", _read_gpu)


def _read_gpu(path: Path) -> GpuEntry:
    raw = read_toml(path)
    aliases, generation = tuple(raw.pop("aliases", ())), str(raw.pop("generation", ""))
    spec = parse(GpuSpec, raw, place=path.name)
    spec = replace(spec, collectives=_collectives_of(spec))
    return GpuEntry(spec=spec, generation=generation, aliases=aliases)


@cache
def collectives() -> Mapping[str, CollectiveEntry]:
    """Return what collective libraries were measured to take, by GPU, and their protocols."""
    return Catalog(
        "collectives", lambda path: parse(CollectiveEntry, read_toml(path), place=path.name)
    )


def _collectives_of(gpu: GpuSpec) -> Collectives:
    """Return the libraries' tables on a GPU, and how NCCL crosses the nodes of NVIDIA's."""
    measured = [entry.measured for entry in collectives().values() if entry.gpu == gpu.name]
    return Collectives(
        measured=tuple(table for tables in measured for table in tables),
        protocols=collectives()["nccl"].protocols if gpu.vendor == "NVIDIA" else (),
    )


def gpu_generation(name: str) -> str:
    """Return the generation of a GPU of the catalog; its name where the catalog has neither."""
    return (gpus()[name].generation if name in gpus() else "") or name


def find_gpu(name: str, *, place: str = "cluster.gpu") -> GpuSpec:
    """Return the GPU that *name*, a catalog name or an alias, stands for."""
    if name in gpus():  # a file's own name needs no other file
        return gpus()[name].spec
    for key, entry in gpus().items():
        if name.lower() in {alias.lower() for alias in (key, *entry.aliases)}:
            return entry.spec
    raise unknown(place, name, "a GPU of the catalog", gpus())
