"""What collective libraries were measured to take, and the fixed times of their protocols."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizing.errors import InputError
from sizing.specs.checks import STRICT, not_negative, positive
from sizing.specs.gpu import Source

if TYPE_CHECKING:
    from sizing.specs.efficiency import CollectiveTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """
    `[[measured]]`: seconds by size of one collective of one library on one group.

    Attributes:
        library: `nccl`, `mscclpp` or `custom`.
        pattern: as `Exchange.pattern`.
        gpus: of the group.
        domains: HB domains that it spreads over.
        cuda_graph: captured in a CUDA graph; else with the time of launching.
        size_bytes: ascending, as `Exchange.size_bytes` counts them.
        seconds: of each.
        from_gpu: take both from this key of the GPU's own file instead (`all_reduce.8`).
        switches_bytes: sizes from which the library is known to run another algorithm.
        outlier_bytes: sizes measured but not read: nothing else follows from them.
        bus_bytes_per_s: bus bandwidth that large messages level off at; `None`: the last points'.
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

    def __post_init__(self) -> None:
        """Check that sizes ascend and that each has its time."""
        place = f"measured.{self.library}.{self.gpus}"
        positive(**{f"{place}.gpus": self.gpus, f"{place}.domains": self.domains})
        positive(**{f"{place}.bus_bytes_per_s": self.bus_bytes_per_s})
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
class Protocol:
    """
    `[[protocols]]`: fixed times of one way in which a library sends (docs/model.md, eq. H3).

    Attributes:
        base_s: however small and near.
        inside_s: of a hop in the HB domain.
        between_s: of a hop between nodes.
        overhead: bytes on the wire for each byte of payload, flags and pacing included.
    """

    __pydantic_config__ = STRICT

    name: str
    base_s: float
    inside_s: float
    between_s: float
    overhead: float = 1.0

    def __post_init__(self) -> None:
        """Check times."""
        positive(**{f"protocols.{self.name}.overhead": self.overhead})
        not_negative(
            **{
                f"protocols.{self.name}.base_s": self.base_s,
                f"protocols.{self.name}.inside_s": self.inside_s,
                f"protocols.{self.name}.between_s": self.between_s,
            }
        )


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
    protocols: tuple[Protocol, ...] = ()
    sources: tuple[Source, ...] = ()
