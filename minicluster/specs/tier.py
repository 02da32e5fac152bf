"""One tier of a network, as a file says it and as formulas take it."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, fraction, not_negative, positive

UNITS = {"bytes_per_s": 1.0, "gbyte_per_s": 1e9, "gbit_per_s": 1e9 / 8}
"""Keys that may say a tier's bandwidth, and how many bytes/s one of each is."""
PLAUSIBLE = (1e7, 1e13)
"""Bytes/s of a GPU's link: outside, a unit was mistaken (80 Mb/s to 80 Tb/s)."""
NAMES = (
    "say bytes_per_s, gbyte_per_s (gigabytes) or gbit_per_s (gigabits) per GPU and one way;"
    " two_way = true where the number counts both"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """
    `[[tiers]]` of a cluster preset, from the inside out; the first is the HB domain.

    The bandwidth is what one GPU has towards others that it meets at this tier, in exactly one
    of three units; left out, it is the GPU's own of the catalog.

    Attributes:
        name: `hb`, `rack`, `pod`, `zone` or whatever the site calls it.
        gpus: inside one unit of this tier; a multiple of the tier before.
        bytes_per_s: bandwidth in bytes.
        gbyte_per_s: or in gigabytes.
        gbit_per_s: or in gigabits, as NICs and switches are sold.
        two_way: the number counts both directions, as NVLink is advertised; half of it is taken.
        efficiency_fraction: what large transfers achieve; left out: the GPU's own.
        latency_s: what a hop across this tier adds to one across the tier before.
        oversubscription: downlinks per uplink on the way into this tier, 1 or more; cumulative.
    """

    __pydantic_config__ = STRICT

    name: str
    gpus: int
    bytes_per_s: float | None = None
    gbyte_per_s: float | None = None
    gbit_per_s: float | None = None
    two_way: bool = False
    efficiency_fraction: float | None = None
    latency_s: float | None = None
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        """Check numbers and that there is one unit."""
        place = f"tiers.{self.name}"
        given = [key for key in UNITS if getattr(self, key) is not None]
        positive(**{f"{place}.gpus": self.gpus})
        positive(**{f"{place}.{key}": getattr(self, key) for key in UNITS})
        fraction(**{f"{place}.efficiency_fraction": self.efficiency_fraction})
        not_negative(**{f"{place}.latency_s": self.latency_s})
        if len(given) > 1:
            raise InputError(f"{place}: {' and '.join(given)}", "both", "one of them")
        if self.two_way and not given:
            raise InputError(f"{place}.two_way", "true", "a bandwidth beside it")
        if not self.oversubscription >= 1:
            raise InputError(
                f"{place}.oversubscription",
                self.oversubscription,
                "1 or more: downlinks for each uplink",
                "1:7 is written 7",
            )
        found = self.one_way_bytes_per_s
        if found is not None and not PLAUSIBLE[0] <= found <= PLAUSIBLE[1]:
            raise InputError(
                f"{place}.{given[0]}", getattr(self, given[0]), "a link of a GPU", NAMES
            )

    @property
    def one_way_bytes_per_s(self) -> float | None:
        """What the file says, one way, in bytes/s; `None`: nothing."""
        for key, unit in UNITS.items():
            value: float | None = getattr(self, key)
            if value is not None:
                return value * unit / (2 if self.two_way else 1)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """
    One tier with nothing left out.

    Attributes:
        name: as the file calls it.
        gpus: inside one unit.
        bytes_per_s: of one GPU, one way, peak.
        efficiency_fraction: of it for large transfers.
        latency_s: of a hop between two GPUs that meet at this tier, all tiers below included.
        oversubscription: of all tiers up to this one together.
    """

    name: str
    gpus: int
    bytes_per_s: float
    efficiency_fraction: float
    latency_s: float
    oversubscription: float

    def achieved_bytes_per_s(self, sending_fraction: float = 1.0) -> float:
        """
        Return what a GPU achieves when *sending_fraction* of its unit sends across at once.

            B_j e_j / max(1, o_j x)      (docs/model.md, eq. F2)

        Uplinks are shared by the flows that cross, not by the GPUs that could.
        """
        shared = max(1.0, self.oversubscription * sending_fraction)
        return self.bytes_per_s * self.efficiency_fraction / shared
