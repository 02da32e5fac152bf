"""The catalog of list prices, `configs/prices.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.errors import InputError
from minicluster.specs.price import ListPrice, PriceList
from sizing.catalog.folder import configs

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceCatalog:
    """The file."""

    lists: tuple[PriceList, ...]


@cache
def price_lists() -> tuple[PriceList, ...]:
    """Return every list."""
    path = configs() / "prices.toml"
    return parse(PriceCatalog, read_toml(path), place=path.name).lists


def list_price(gpu: str) -> ListPrice | None:
    """Return the median of what the lists ask for a GPU; `None`: none of them has it."""
    found = [each for each in price_lists() if gpu in each.usd_per_gpu_hour]
    if not found:
        return None
    asked = [each.usd_per_gpu_hour[gpu] for each in found]
    dates = [each.date for each in found]
    return ListPrice(
        gpu=gpu,
        usd_per_gpu_hour=median(asked),
        lowest_usd_per_gpu_hour=min(asked),
        highest_usd_per_gpu_hour=max(asked),
        lists=len(found),
        oldest=min(dates),
        newest=max(dates),
    )


def list_prices(gpus: Iterable[str], *, place: str) -> tuple[ListPrice, ...]:
    """
    Return the list price of each GPU.

    Raises:
        InputError: the first that is on no list, naming *place*.
    """
    found = {gpu: list_price(gpu) for gpu in gpus}
    for gpu, price in found.items():
        if price is None:
            raise InputError(
                place,
                "catalog",
                f"a GPU with a list price: configs/prices.toml has none of {gpu}",
                f'your own price: [search] prices_usd_per_gpu_hour = {{ "{gpu}" = 2.0 }}',
            )
    return tuple(price for price in found.values() if price is not None)
