"""One accelerator: datasheet peaks, measured efficiencies, and times of collective libraries."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, not_negative, one_of, positive
from minicluster.specs.efficiency import GpuEfficiency

if TYPE_CHECKING:
    from minicluster.specs.efficiency import CollectiveTable


ALGORITHMS = ("ring", "tree")
BUS_SIZES = 3
"""Bus bandwidths of a protocol: in one HB domain, two, more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """
    `[[measured]]`: seconds by size of one collective of one library on one group.

    Attributes:
        library: `nccl`, `mscclpp` or `custom`.
        pattern: as `Exchange.pattern`.
        gpus: size of the group.
        domains: HB domains that the group spreads over.
        cuda_graph: the collective was captured in a CUDA graph; else the time includes launching.
        size_bytes: sizes, ascending, as `Exchange.size_bytes` counts them.
        seconds: time at each size.
        from_gpu: take both from this key of the GPU's own file instead (`all_reduce.8`).
        switches_bytes: sizes from which the library is known to run another algorithm.
        outlier_bytes: sizes measured but not read: nothing else follows from them.
        bus_bytes_per_s: bus bandwidth that large messages level off at; `None`: the last points'.
        between_bytes_per_s: one way, of a GPU's link between the HB domains it was measured on.
    """

    __pydantic_config__ = STRICT

    library: str
    pattern: str
    gpus: int
    domains: int
    cuda_graph: bool
    size_bytes: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    from_gpu: str | None = None
    switches_bytes: tuple[float, ...] = ()
    outlier_bytes: tuple[float, ...] = ()
    bus_bytes_per_s: float | None = None
    between_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Check that sizes ascend and that each has its time."""
        place = f"measured.{self.library}.{self.gpus}"
        positive(**{f"{place}.gpus": self.gpus, f"{place}.domains": self.domains})
        positive(
            **{
                f"{place}.bus_bytes_per_s": self.bus_bytes_per_s,
                f"{place}.between_bytes_per_s": self.between_bytes_per_s,
            }
        )
        if len(self.size_bytes) != len(self.seconds) or bool(self.size_bytes) == bool(
            self.from_gpu
        ):
            raise InputError(f"{place}.seconds", len(self.seconds), "one for each of size_bytes")
        if any(after <= before for before, after in itertools.pairwise(self.size_bytes)):
            raise InputError(f"{place}.size_bytes", list(self.size_bytes), "ascending numbers")
        positive(**{f"{place}.seconds.{i}": value for i, value in enumerate(self.seconds)})

    def with_points(self, table: CollectiveTable) -> MeasuredCollective:
        """Return the same with the points of a GPU's own table."""
        return replace(self, from_gpu=None, size_bytes=table.size_bytes, seconds=table.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProtocol:
    """
    `[[protocols]]`: one algorithm of a library in one of its protocols (docs/model.md, eq. H3).

    Attributes:
        algorithm: `ring` or `tree`; only all-reduces have trees.
        base_s: time of the smallest collective between neighbours.
        inside_s: time of a hop in the HB domain.
        between_s: time of a hop between HB domains.
        post_s: time of a host to post a send to the network; no hop between domains is shorter.
        overhead: bytes on the wire for each byte of payload, flags and pacing included.
        bus_bytes_per_s: the most that it reaches in one HB domain, two, more; empty: the links'.
        up_to_bytes: between domains the library changes to another protocol here.
    """

    __pydantic_config__ = STRICT

    name: str
    algorithm: str
    base_s: float
    inside_s: float
    between_s: float
    post_s: float = 0.0
    overhead: float = 1.0
    bus_bytes_per_s: tuple[float, ...] = ()
    up_to_bytes: float | None = None

    def __post_init__(self) -> None:
        """Check the algorithm, times and bandwidths."""
        place = f"protocols.{self.name}"
        one_of(ALGORITHMS, **{f"{place}.algorithm": self.algorithm})
        if len(self.bus_bytes_per_s) not in (0, BUS_SIZES):
            raise InputError(
                f"{place}.bus_bytes_per_s", list(self.bus_bytes_per_s), "three numbers, or none"
            )
        positive(**{f"{place}.overhead": self.overhead, f"{place}.up_to_bytes": self.up_to_bytes})
        positive(**{f"{place}.bus_bytes_per_s.{i}": b for i, b in enumerate(self.bus_bytes_per_s)})
        not_negative(
            **{
                f"{place}.base_s": self.base_s,
                f"{place}.inside_s": self.inside_s,
                f"{place}.between_s": self.between_s,
                f"{place}.post_s": self.post_s,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """
    Collective libraries on one GPU and between its HB domains, read from configs/collectives.

    Attributes:
        measured: tables of every library.
        protocols: of the library that crosses HB domains.
    """

    __pydantic_config__ = STRICT

    measured: tuple[MeasuredCollective, ...] = ()
    protocols: tuple[CollectiveProtocol, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSource:
    """Source of numbers: the keys that it covers, the document, and the date when it was read."""

    __pydantic_config__ = STRICT

    covers: str
    document: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """
    One accelerator of the catalog, or one CPU core share (`kind = "cpu"`).

    A CPU has no peaks here: its step times come from a calibration on the machine itself,
    and `require` refuses a number that is `None`.

    Attributes:
        ray_accelerator: accelerator type by which Ray knows it; `None`: Ray has no name for it, and
            a replica is placed by node labels alone.
        num_sms: streaming multiprocessors (AMD: compute units), for wave quantisation.
        peak_flops_per_s: dense (no sparsity), per dtype.
        scale_up_bytes_per_s: NVLink-class, one direction, per GPU.
        scale_out_bytes_per_s: network, one direction, per GPU.
        collectives: what libraries take beside the tables of `efficiency`.
    """

    __pydantic_config__ = STRICT

    name: str
    vendor: str
    kind: str = "gpu"
    ray_accelerator: str | None = None
    num_sms: int | None = None
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)
    hbm_bytes: float | None = None
    hbm_bytes_per_s: float | None = None
    scale_up_bytes_per_s: float | None = None
    scale_out_bytes_per_s: float | None = None
    power_w: float | None = None
    efficiency: GpuEfficiency | None = None
    collectives: Collectives = field(default_factory=Collectives)
    sources: tuple[NumberSource, ...] = ()

    def __post_init__(self) -> None:
        """Check kind and numbers."""
        one_of(("gpu", "cpu"), kind=self.kind)
        positive(
            num_sms=self.num_sms,
            hbm_bytes=self.hbm_bytes,
            hbm_bytes_per_s=self.hbm_bytes_per_s,
            scale_up_bytes_per_s=self.scale_up_bytes_per_s,
            scale_out_bytes_per_s=self.scale_out_bytes_per_s,
            power_w=self.power_w,
            **{f"peak_flops_per_s.{k}": v for k, v in self.peak_flops_per_s.items()},
        )

    def require(self, name: str) -> float:
        """Return a number of this GPU, or refuse if the catalog does not have it."""
        value: float | None = getattr(self, name)
        if value is None:
            raise InputError(
                f"gpu {self.name}: {name}", None, "a number with its source in configs/gpus"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEntry:
    """
    One file of `configs/collectives`: what was measured on a GPU, or the protocols of a library.

    Attributes:
        gpu: name in configs/gpus; `None`: a file of protocols.
    """

    __pydantic_config__ = STRICT

    name: str
    gpu: str | None = None
    measured: tuple[MeasuredCollective, ...] = ()
    protocols: tuple[CollectiveProtocol, ...] = ()
    sources: tuple[NumberSource, ...] = ()
