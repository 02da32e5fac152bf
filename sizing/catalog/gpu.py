"""The catalogs of GPUs, with what collective libraries take on them, and of their list prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.errors import InputError
from minicluster.specs.gpu import CollectiveEntry, Collectives, GpuSpec
from minicluster.specs.price import ListPrice, PriceList
from sizing.catalog.folder import Catalog, configs, files, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
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
    aliases: tuple[str, ...] = ()


@cache
def gpus() -> Mapping[str, GpuEntry]:
    """Return the GPU catalog."""
    return Catalog("gpus", _read_gpu)


def _read_gpu(path: Path) -> GpuEntry:
    raw = read_toml(path)
    aliases, generation = tuple(raw.pop("aliases", ())), str(raw.pop("generation", ""))
    spec = parse(GpuSpec, raw, place=path.name)
    measured = (entry.measured for entry in collectives().values() if entry.gpu == spec.name)
    libraries = Collectives(
        measured=tuple(chain.from_iterable(measured)),
        # How NCCL crosses nodes, on NVIDIA's GPUs alone.
        protocols=collectives()["nccl"].protocols if spec.vendor == "NVIDIA" else (),
    )
    return GpuEntry(
        spec=replace(spec, collectives=libraries), generation=generation, aliases=aliases
    )


@cache
def collectives() -> Mapping[str, CollectiveEntry]:
    """Return what collective libraries were measured to take, by GPU, and their protocols."""
    return Catalog(
        "collectives", lambda path: parse(CollectiveEntry, read_toml(path), place=path.name)
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
    if name in files("clusters"):
        way_out = f'{name} is a preset: cluster.preset = "{name}"'
        raise InputError(place, name, "a GPU of the catalog", way_out)
    raise unknown(place, name, "a GPU of the catalog", gpus())


# --- list prices


@dataclass(frozen=True, slots=True, kw_only=True)
class _PriceCatalog:
    lists: tuple[PriceList, ...]


@cache
def price_lists() -> tuple[PriceList, ...]:
    """Return every list of `configs/prices.toml`."""
    path = configs() / "prices.toml"
    return parse(_PriceCatalog, read_toml(path), place=path.name).lists


def list_price(gpu: str) -> ListPrice | None:
    """Return the median of what the lists ask for a GPU; `None`: none of them has it."""
    lists = [prices for prices in price_lists() if gpu in prices.usd_per_gpu_hour]
    if not lists:
        return None
    usd_per_gpu_hour = [prices.usd_per_gpu_hour[gpu] for prices in lists]
    dates = [prices.date for prices in lists]
    return ListPrice(
        gpu=gpu,
        usd_per_gpu_hour=median(usd_per_gpu_hour),
        lowest_usd_per_gpu_hour=min(usd_per_gpu_hour),
        highest_usd_per_gpu_hour=max(usd_per_gpu_hour),
        lists=len(lists),
        oldest=min(dates),
        newest=max(dates),
    )


def list_prices(gpus: Iterable[str], *, place: str) -> tuple[ListPrice, ...]:
    """
    Return the list price of each GPU.

    Raises:
        InputError: the first that is on no list, naming *place*.
    """
    prices = []
    for gpu in gpus:
        price = list_price(gpu)
        if price is None:
            raise InputError(
                place,
                "catalog",
                f"a GPU with a list price: configs/prices.toml has none of {gpu}",
                f'your own price: [search] prices_usd_per_gpu_hour = {{ "{gpu}" = 2.0 }}',
            )
        prices.append(price)
    return tuple(prices)
