"""Shares of its peaks that a GPU's kernels and links achieve, fitted or a documented default."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields, replace

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, fraction, not_negative, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmEfficiency:
    """
    Efficiency of GEMM kernels of one dtype (docs/model.md, eq. R2).

    Attributes:
        compute_fraction: e_c, of the dense peak.
        memory_fraction: e_m, of HBM bandwidth while weights stream.
        latency_s: t_0, fixed.
        wave_fraction: h, the share of an incomplete last wave of tiles that costs time.
        smoothness: p; `None`: infinitely sharp, the larger of compute and memory.
        small_tile_fraction: e_s, what tiles of 64 x 128 achieve of e_c.
        ramp_inner: k_0, columns of the activations that starting and ending a tile costs.
        inner_latency_s: r, per column of the activations, however few the rows.
        activation_fraction: b, bytes of activations as they are not hidden, of HBM bandwidth;
            above 1 where they are quantised on the way.
    """

    __pydantic_config__ = STRICT

    compute_fraction: float
    memory_fraction: float
    latency_s: float
    wave_fraction: float = 0.0
    smoothness: float | None = None
    small_tile_fraction: float = 1.0
    ramp_inner: float = 0.0
    inner_latency_s: float = 0.0
    activation_fraction: float = 1.0

    def __post_init__(self) -> None:
        """Check that fractions are fractions."""
        fraction(
            compute_fraction=self.compute_fraction,
            memory_fraction=self.memory_fraction,
            small_tile_fraction=self.small_tile_fraction,
        )
        not_negative(
            latency_s=self.latency_s,
            wave_fraction=self.wave_fraction,
            ramp_inner=self.ramp_inner,
            inner_latency_s=self.inner_latency_s,
            activation_fraction=self.activation_fraction,
        )
        _check_smoothness(self.smoothness)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionEfficiency:
    """
    Efficiency of attention over a prompt (docs/model.md, eq. R3).

    Attributes:
        compute_fraction: e_c, of the bf16 peak, over causal pairs, long prompts, head 128.
        memory_fraction: e_m, of HBM bandwidth.
        latency_s: t_0, fixed.
        half_tokens: s_0, keys at which e_c is down to a half.
        head_exponent: how e_c grows with the head dimension.
        key_latency_s: l, per key of a head of 128, for the one block of queries that ends last.
        smoothness: p, between the throughput and that block.
    """

    __pydantic_config__ = STRICT

    compute_fraction: float
    memory_fraction: float
    latency_s: float
    half_tokens: float = 0.0
    head_exponent: float = 0.0
    key_latency_s: float = 0.0
    smoothness: float | None = None

    def __post_init__(self) -> None:
        """Check that fractions are fractions."""
        fraction(compute_fraction=self.compute_fraction, memory_fraction=self.memory_fraction)
        not_negative(
            latency_s=self.latency_s,
            half_tokens=self.half_tokens,
            head_exponent=self.head_exponent,
            key_latency_s=self.key_latency_s,
        )
        _check_smoothness(self.smoothness)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionEfficiency:
    """
    Efficiency of attention of one token per sequence (docs/model.md, eq. R5).

    Attributes:
        memory_fraction: e_m, of HBM bandwidth, over the KV cache.
        compute_fraction: e_c, of the bf16 peak.
        latency_s: t_0, fixed.
        key_latency_s: l, per key of a sequence.
        item_latency_s: r, per sequence and query head.
        smoothness: p.
        fp8_fraction: what is left of e_m where the cache is kept in 8 bits.
    """

    __pydantic_config__ = STRICT

    memory_fraction: float
    compute_fraction: float
    latency_s: float
    key_latency_s: float = 0.0
    item_latency_s: float = 0.0
    smoothness: float | None = None
    fp8_fraction: float = 1.0

    def __post_init__(self) -> None:
        """Check that fractions are fractions."""
        fraction(
            memory_fraction=self.memory_fraction,
            compute_fraction=self.compute_fraction,
            fp8_fraction=self.fp8_fraction,
        )
        not_negative(
            latency_s=self.latency_s,
            key_latency_s=self.key_latency_s,
            item_latency_s=self.item_latency_s,
        )
        _check_smoothness(self.smoothness)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEfficiency:
    """
    Efficiency of a kernel that mostly moves bytes (docs/model.md, eq. R4).

    Attributes:
        memory_fraction: e_m, of HBM bandwidth.
        latency_s: t_0, fixed.
        compute_fraction: e_c, of the bf16 peak, where it multiplies too.
        row_latency_s: r, per token of a prompt where they are worked off in order, or per
            sequence.
    """

    __pydantic_config__ = STRICT

    memory_fraction: float
    latency_s: float
    compute_fraction: float = 1.0
    row_latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Check that fractions are fractions."""
        fraction(memory_fraction=self.memory_fraction, compute_fraction=self.compute_fraction)
        not_negative(latency_s=self.latency_s, row_latency_s=self.row_latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """
    Measured seconds of one collective on one group, by bytes (docs/model.md, eq. N1).

    Attributes:
        size_bytes: ascending, as `Exchange.size_bytes` counts them.
        seconds: never descending.
    """

    __pydantic_config__ = STRICT

    size_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that the table rises."""
        if not self.size_bytes or len(self.size_bytes) != len(self.seconds):
            raise InputError("seconds", len(self.seconds), "as many as size_bytes, at least one")
        for name, values in (("size_bytes", self.size_bytes), ("seconds", self.seconds)):
            positive(**{name: values[0]})
            if any(after < before for before, after in itertools.pairwise(values)):
                raise InputError(name, list(values), "ascending numbers")


Tables = dict[str, CollectiveTable]
"""Tables by number of GPUs of the group ("2", "4", "8")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKernels:
    """Kernels in which one engine differs from those of `GpuEfficiency`; the rest are shared."""

    __pydantic_config__ = STRICT

    prefill_attention: PrefillAttentionEfficiency | None = None
    decode_attention: DecodeAttentionEfficiency | None = None
    latent_decode_attention: DecodeAttentionEfficiency | None = None
    all_reduce: Tables = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency:
    """
    Efficiencies of a GPU's kernels and links, fitted to measurements or a documented default.

    Attributes:
        gemm: per dtype of the multiplication; at least `bf16`.
        grouped_gemm: per dtype, GEMMs of experts; not listed: as `gemm`.
        prefill_attention: of vLLM's kernels, as the next two.
        decode_attention: over keys and values.
        latent_decode_attention: over the latent of MLA; `None`: as decode_attention.
        linear_attention: recurrent layers; `None`: as elementwise.
        elementwise: norms, rotary, activations.
        scale_up_fraction: of `scale_up_bytes_per_s`, large collectives, where there is no table.
        scale_out_fraction: of `scale_out_bytes_per_s`, large transfers.
        collective_latency_s: fixed time of a collective without a table, on 2 GPUs; grows with
            the logarithm of the group.
        all_reduce: tables inside the HB domain, of kernels captured in CUDA graphs.
        all_gather: tables; S is the whole.
        reduce_scatter: tables; S is the whole.
        all_to_all: tables; S is what one GPU sends.
        engines: by name of the engine.
        sustained_fraction: per dtype of the multiplication, what is left of the compute that the
            op tables show when GEMMs follow one another for long, at the power limit; else 1.
        fitted: True if fitted on measurements of this GPU, False for a default.
    """

    __pydantic_config__ = STRICT

    gemm: dict[str, GemmEfficiency]
    grouped_gemm: dict[str, GemmEfficiency] = field(default_factory=dict)
    prefill_attention: PrefillAttentionEfficiency
    decode_attention: DecodeAttentionEfficiency
    latent_decode_attention: DecodeAttentionEfficiency | None = None
    linear_attention: StreamEfficiency | None = None
    elementwise: StreamEfficiency
    scale_up_fraction: float
    scale_out_fraction: float
    collective_latency_s: float
    all_reduce: Tables = field(default_factory=dict)
    all_gather: Tables = field(default_factory=dict)
    reduce_scatter: Tables = field(default_factory=dict)
    all_to_all: Tables = field(default_factory=dict)
    engines: dict[str, EngineKernels] = field(default_factory=dict)
    sustained_fraction: dict[str, float] = field(default_factory=dict)
    fitted: bool

    def __post_init__(self) -> None:
        """Check that fractions are fractions, and that bf16 is there."""
        if "bf16" not in self.gemm:
            raise InputError("efficiency.gemm.bf16", None, "the efficiency of bf16 GEMM")
        fraction(
            scale_up_fraction=self.scale_up_fraction,
            scale_out_fraction=self.scale_out_fraction,
            **{f"sustained_fraction.{k}": v for k, v in self.sustained_fraction.items()},
        )
        not_negative(collective_latency_s=self.collective_latency_s)

    def of_engine(self, name: str) -> GpuEfficiency:
        """Return the efficiencies with the kernels of one engine in place of the shared ones."""
        return self.with_kernels(self.engines.get(name))

    def with_kernels(self, own: EngineKernels | None) -> GpuEfficiency:
        """Return the efficiencies with *own* kernels in place of the shared ones."""
        if own is None:
            return self
        changed = {
            part.name: getattr(own, part.name)
            for part in fields(own)
            if getattr(own, part.name) not in (None, {})
        }
        return replace(self, **changed)


def _check_smoothness(smoothness: float | None) -> None:
    """Refuse a smoothness below that of a sum."""
    if smoothness is not None and not smoothness >= 1:
        raise InputError("smoothness", smoothness, "1 or more")
