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
class GemmEfficiency:
    """
    What GEMM kernels of one dtype achieve of the peaks; docs/model.md, eq. for GEMM.

        t = (t_c^p + t_m^p)^(1/p) + t_0,  t_c = flops (1 + h (W - 1)) / (peak e_c),
        t_m = bytes / (hbm e_m)

    W >= 1 is the wave quantisation: waves of 128 x 128 tiles over the SMs, rounded up, over the
    waves that the tiles would fill exactly.

    Attributes:
        compute_fraction: e_c.
        memory_fraction: e_m.
        latency_s: t_0.
        wave_fraction: h, the share of an incomplete last wave that costs time.
        smoothness: p; `None`: infinitely sharp, the larger of the two.
    """

    __pydantic_config__ = STRICT

    compute_fraction: float
    memory_fraction: float
    latency_s: float
    wave_fraction: float = 0.0
    smoothness: float | None = None

    def __post_init__(self) -> None:
        """Check that fractions are fractions."""
        fraction(compute_fraction=self.compute_fraction, memory_fraction=self.memory_fraction)
        not_negative(latency_s=self.latency_s, wave_fraction=self.wave_fraction)
        if self.smoothness is not None and not self.smoothness >= 1:
            raise InputError("smoothness", self.smoothness, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency:
    """
    What kernels achieve of the peaks, fitted from measurements or a documented default.

    Attributes:
        gemm: per dtype of the multiplication; at least `bf16`.
        prefill_attention_compute_fraction: of `peak_flops_per_s` bf16, causal, long prompts.
        prefill_attention_half_tokens: prompt length at which that share is down to a half.
        prefill_attention_latency_s: fixed time of one kernel.
        decode_attention_memory_fraction: of `hbm_bytes_per_s`, over the KV cache.
        decode_attention_latency_s: fixed time of one kernel.
        elementwise_memory_fraction: of `hbm_bytes_per_s`, norms and activations.
        elementwise_latency_s: fixed time of one kernel.
        scale_up_fraction: of `scale_up_bytes_per_s`, large collectives.
        scale_out_fraction: of `scale_out_bytes_per_s`, large transfers.
        allreduce_latency_s: fixed time of a small all-reduce inside the HB domain, by group
            size ("2", "4", "8").
        allreduce_bus_bytes_per_s: measured bus bandwidth, 2 (n - 1) / n bytes / seconds, of a
            large all-reduce, by group size; above the link's own speed where the switch reduces
            (NVLS). Group sizes not listed: `scale_up_fraction` of the link.
        fitted: True if fitted on measurements of this GPU, False for a default.
    """

    __pydantic_config__ = STRICT

    gemm: dict[str, GemmEfficiency]
    prefill_attention_compute_fraction: float
    prefill_attention_half_tokens: float
    prefill_attention_latency_s: float
    decode_attention_memory_fraction: float
    decode_attention_latency_s: float
    elementwise_memory_fraction: float
    elementwise_latency_s: float
    scale_up_fraction: float
    scale_out_fraction: float
    allreduce_latency_s: dict[str, float]
    allreduce_bus_bytes_per_s: dict[str, float] = field(default_factory=dict)
    fitted: bool

    def __post_init__(self) -> None:
        """Check that fractions are fractions, and that bf16 is there."""
        if "bf16" not in self.gemm:
            raise InputError("efficiency.gemm.bf16", None, "the efficiency of bf16 GEMM")
        fraction(
            prefill_attention_compute_fraction=self.prefill_attention_compute_fraction,
            decode_attention_memory_fraction=self.decode_attention_memory_fraction,
            elementwise_memory_fraction=self.elementwise_memory_fraction,
            scale_up_fraction=self.scale_up_fraction,
            scale_out_fraction=self.scale_out_fraction,
        )
        not_negative(
            prefill_attention_half_tokens=self.prefill_attention_half_tokens,
            prefill_attention_latency_s=self.prefill_attention_latency_s,
            decode_attention_latency_s=self.decode_attention_latency_s,
            elementwise_latency_s=self.elementwise_latency_s,
            **{f"allreduce_latency_s.{k}": v for k, v in self.allreduce_latency_s.items()},
        )
        for group, bus in self.allreduce_bus_bytes_per_s.items():
            positive(**{f"allreduce_bus_bytes_per_s.{group}": bus})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """
    One accelerator of the catalog, or one CPU core share (`kind = "cpu"`).

    A CPU has no peaks here: its step times come from a calibration on the machine itself,
    and whoever asks for a number that is `None` is refused.

    Attributes:
        num_sms: streaming multiprocessors (AMD: compute units), for wave quantisation.
        peak_flops_per_s: dense (no sparsity), per dtype.
        scale_up_bytes_per_s: NVLink-class, one direction, per GPU.
        scale_out_bytes_per_s: network, one direction, per GPU.
    """

    __pydantic_config__ = STRICT

    name: str
    vendor: str
    kind: str = "gpu"
    num_sms: int | None = None
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
