"""One accelerator: datasheet peaks and measured efficiencies, kept apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, one_of, positive
from minicluster.specs.efficiency import GpuEfficiency
from minicluster.specs.library import Collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSource:
    """Where numbers come from: `covers` names the keys, `document` the page, `date` when read."""

    __pydantic_config__ = STRICT

    covers: str
    document: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """
    One accelerator of the catalog, or one CPU core share (`kind = "cpu"`).

    A CPU has no peaks here: its step times come from a calibration on the machine itself,
    and whoever asks for a number that is `None` is refused.

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
