"""One accelerator: datasheet peaks, measured efficiencies, and times of collective libraries."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Fraction, NotNegative, Positive, Spec, Whole, choice
from minicluster.specs.efficiency import GpuEfficiency

BUS_SIZES = 3  # bus bandwidths of a protocol: in one HB domain, two, more


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective(Spec):
    """
    `[[measured]]`: seconds by size of one collective of one library on one group.

    Attributes:
        library: `nccl`, `mscclpp` or `custom`.
        pattern: as `Exchange.pattern`.
        domains: HB domains that the group spreads over.
        cuda_graph: the collective was captured in a CUDA graph; else the time includes launching.
        size_bytes: sizes, ascending, as `Exchange.size_bytes` counts them.
        from_gpu: take both from this key of the GPU's own file instead (`all_reduce.8`).
        switches_bytes: sizes from which the library is known to run another algorithm.
        outlier_bytes: sizes measured but not read: nothing else follows from them.
        bus_bytes_per_s: bus bandwidth that large messages level off at; `None`: the last points'.
        between_bytes_per_s: one way, of a GPU's link between the HB domains it was measured on.
    """

    _TABLE: ClassVar[str] = "measured.{0.library}.{0.gpus}"

    library: str
    pattern: str
    gpus: Count
    domains: Count
    cuda_graph: bool
    size_bytes: tuple[float, ...] = ()
    seconds: tuple[Positive, ...] = ()
    from_gpu: str | None = None
    switches_bytes: tuple[float, ...] = ()
    outlier_bytes: tuple[float, ...] = ()
    bus_bytes_per_s: Positive | None = None
    between_bytes_per_s: Positive | None = None

    def _check(self) -> None:
        points = len(self.size_bytes)
        if points != len(self.seconds) or bool(points) == bool(self.from_gpu):
            place = self._place("seconds")
            raise InputError(place, len(self.seconds), "one for each of size_bytes")
        if any(after <= before for before, after in itertools.pairwise(self.size_bytes)):
            place = self._place("size_bytes")
            raise InputError(place, list(self.size_bytes), "ascending numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProtocol(Spec):
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

    _TABLE: ClassVar[str] = "protocols.{0.name}"

    name: str
    algorithm: Annotated[str, choice("ring", "tree")]
    base_s: NotNegative
    inside_s: NotNegative
    between_s: NotNegative
    post_s: NotNegative = 0.0
    overhead: Positive = 1.0
    bus_bytes_per_s: tuple[Positive, ...] = ()
    up_to_bytes: Positive | None = None

    def _check(self) -> None:
        bus = self.bus_bytes_per_s
        if len(bus) not in (0, BUS_SIZES):
            raise InputError(self._place("bus_bytes_per_s"), list(bus), "three numbers, or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAllLibrary(Spec):
    """
    `[all_to_all]`: a library that sends each token to the GPUs of its experts (eq. H7).

    Steps that only decode run kernels that send every expert of a token a copy; steps with prompts
    run kernels that send a GPU, and an HB domain, one copy of a token.

    Attributes:
        latency_s: fixed part of a dispatch or combine in a step that only decodes.
        prompt_latency_s: the same in a step with prompts, like the others below.
        inside_fraction: of what large transfers achieve in the HB domain.
        inside_bytes_per_s: the most of it, however fast the links are.
        prompt_sms: SMs that its kernels take from what is computed at the same time.
    """

    _TABLE: ClassVar[str] = "all_to_all"

    name: str
    gpus: tuple[str, ...]
    latency_s: NotNegative
    prompt_latency_s: NotNegative
    inside_fraction: Fraction
    inside_bytes_per_s: Positive
    prompt_sms: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives(Spec):
    """Collective libraries on one GPU and between its HB domains, read from configs/collectives."""

    measured: tuple[MeasuredCollective, ...] = ()
    protocols: tuple[CollectiveProtocol, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSource(Spec):
    """Source of numbers: the keys that it covers, the document, and the date when it was read."""

    covers: str
    document: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec(Spec):
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

    name: str
    vendor: str
    kind: Annotated[str, choice("gpu", "cpu")] = "gpu"
    ray_accelerator: str | None = None
    num_sms: Count | None = None
    peak_flops_per_s: dict[str, Positive] = field(default_factory=dict)
    hbm_bytes: Positive | None = None
    hbm_bytes_per_s: Positive | None = None
    scale_up_bytes_per_s: Positive | None = None
    scale_out_bytes_per_s: Positive | None = None
    power_w: Positive | None = None
    efficiency: GpuEfficiency | None = None
    collectives: Collectives = field(default_factory=Collectives)
    sources: tuple[NumberSource, ...] = ()

    def require(self, name: str) -> float:
        """Return a number of this GPU, or refuse if the catalog does not have it."""
        value: float | None = getattr(self, name)
        if value is None:
            raise InputError(
                f"gpu {self.name}: {name}", None, "a number with its source in configs/gpus"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEntry(Collectives):
    """
    One file of `configs/collectives`: what was measured on a GPU, or the protocols of a library.

    Attributes:
        gpu: name in configs/gpus; `None`: a file of protocols, or of a library for experts.
    """

    name: str
    gpu: str | None = None
    all_to_all: AllToAllLibrary | None = None
    sources: tuple[NumberSource, ...] = ()
