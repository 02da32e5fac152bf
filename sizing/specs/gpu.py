"""One accelerator: datasheet peaks and measured efficiencies, kept apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from sizing.errors import InputError
from sizing.specs.checks import STRICT, fraction, not_negative, one_of, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where numbers come from: `covers` names the keys, `document` the page, `date` when read."""

    __pydantic_config__ = STRICT

    covers: str
    document: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency:
    """
    What kernels achieve of the peaks, fitted from measurements or a documented default.

    Attributes:
        gemm_compute_fraction: of `peak_flops_per_s`, large GEMM, per weight dtype.
        gemm_memory_fraction: of `hbm_bytes_per_s`, GEMM that streams weights.
        gemm_latency_s: fixed time of one GEMM kernel.
        attention_compute_fraction: of peak, causal prefill attention.
        attention_memory_fraction: of `hbm_bytes_per_s`, decode attention over the KV cache.
        attention_latency_s: fixed time of one attention kernel.
        elementwise_memory_fraction: of `hbm_bytes_per_s`, norms and activations.
        elementwise_latency_s: fixed time of one elementwise kernel.
        scale_up_fraction: of `scale_up_bytes_per_s`, large all-reduce.
        scale_out_fraction: of `scale_out_bytes_per_s`, large transfers.
        allreduce_latency_s: fixed time of a small all-reduce inside the HB domain, by group size.
        fitted: True if fitted on measurements of this GPU, False for a default.
    """

    __pydantic_config__ = STRICT

    gemm_compute_fraction: dict[str, float]
    gemm_memory_fraction: float
    gemm_latency_s: float
    attention_compute_fraction: float
    attention_memory_fraction: float
    attention_latency_s: float
    elementwise_memory_fraction: float
    elementwise_latency_s: float
    scale_up_fraction: float
    scale_out_fraction: float
    allreduce_latency_s: dict[str, float]
    fitted: bool

    def __post_init__(self) -> None:
        """Check that fractions are fractions."""
        fraction(
            gemm_memory_fraction=self.gemm_memory_fraction,
            attention_compute_fraction=self.attention_compute_fraction,
            attention_memory_fraction=self.attention_memory_fraction,
            elementwise_memory_fraction=self.elementwise_memory_fraction,
            scale_up_fraction=self.scale_up_fraction,
            scale_out_fraction=self.scale_out_fraction,
            **{f"gemm_compute_fraction.{k}": v for k, v in self.gemm_compute_fraction.items()},
        )
        not_negative(
            gemm_latency_s=self.gemm_latency_s,
            attention_latency_s=self.attention_latency_s,
            elementwise_latency_s=self.elementwise_latency_s,
            **{f"allreduce_latency_s.{k}": v for k, v in self.allreduce_latency_s.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """
    One accelerator of the catalog, or one CPU core share (`kind = "cpu"`).

    A CPU has no peaks here: its step times come from a calibration on the machine itself,
    and whoever asks for a number that is `None` is refused.

    Attributes:
        peak_flops_per_s: dense (no sparsity), per dtype.
        scale_up_bytes_per_s: NVLink-class, one direction, per GPU.
        scale_out_bytes_per_s: network, one direction, per GPU.
    """

    __pydantic_config__ = STRICT

    name: str
    vendor: str
    kind: str = "gpu"
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)
    hbm_bytes: float | None = None
    hbm_bytes_per_s: float | None = None
    scale_up_bytes_per_s: float | None = None
    scale_out_bytes_per_s: float | None = None
    power_w: float | None = None
    efficiency: GpuEfficiency | None = None
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        """Check kind and numbers."""
        one_of(("gpu", "cpu"), kind=self.kind)
        positive(
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
