"""List prices of GPUs: what providers ask in public, and the price that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minicluster.specs.checks import Count, Positive, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList(Spec):
    """
    `[[lists]]`: what one provider asks on demand.

    Attributes:
        date: on which the list was read, as 2026-11-25.
        document: where it was read, and of which machines it is.
        usd_per_gpu_hour: by GPU of the catalog.
    """

    _TABLE: ClassVar[str] = "lists[{0.provider}]"

    provider: str
    date: str
    document: str
    usd_per_gpu_hour: dict[str, Positive]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPrice(Spec):
    """
    Price of one GPU: the median of the lists that have it.

    Attributes:
        lowest_usd_per_gpu_hour, highest_usd_per_gpu_hour: of these lists.
    """

    gpu: str
    usd_per_gpu_hour: Positive
    lowest_usd_per_gpu_hour: Positive
    highest_usd_per_gpu_hour: Positive
    lists: Count
    oldest: str
    newest: str
