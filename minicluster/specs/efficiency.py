"""Shares of its peaks that a GPU's kernels and links achieve, fitted or a documented default."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields, replace
from typing import Any

from minicluster.errors import InputError
from minicluster.specs.checks import AtLeastOne, Fraction, NotNegative, Positive, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmEfficiency(Spec):
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

    compute_fraction: Fraction
    memory_fraction: Fraction
    latency_s: NotNegative
    wave_fraction: NotNegative = 0.0
    smoothness: AtLeastOne | None = None
    small_tile_fraction: Fraction = 1.0
    ramp_inner: NotNegative = 0.0
    inner_latency_s: NotNegative = 0.0
    activation_fraction: NotNegative = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionEfficiency(Spec):
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

    compute_fraction: Fraction
    memory_fraction: Fraction
    latency_s: NotNegative
    half_tokens: NotNegative = 0.0
    head_exponent: NotNegative = 0.0
    key_latency_s: NotNegative = 0.0
    smoothness: AtLeastOne | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionEfficiency(Spec):
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

    memory_fraction: Fraction
    compute_fraction: Fraction
    latency_s: NotNegative
    key_latency_s: NotNegative = 0.0
    item_latency_s: NotNegative = 0.0
    smoothness: AtLeastOne | None = None
    fp8_fraction: Fraction = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEfficiency(Spec):
    """
    Efficiency of a kernel that mostly moves bytes (docs/model.md, eq. R4).

    Attributes:
        memory_fraction: e_m, of HBM bandwidth.
        latency_s: t_0, fixed.
        compute_fraction: e_c, of the bf16 peak, where it multiplies too.
        row_latency_s: r, per token of a prompt where they are worked off in order, or per
            sequence.
    """

    memory_fraction: Fraction
    latency_s: NotNegative
    compute_fraction: Fraction = 1.0
    row_latency_s: NotNegative = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable(Spec):
    """
    Measured seconds of one collective on one group, by bytes (docs/model.md, eq. N1).

    Attributes:
        size_bytes: ascending, as `Exchange.size_bytes` counts them.
        seconds: never descending.
    """

    size_bytes: tuple[Positive, ...]
    seconds: tuple[Positive, ...]

    def _check(self) -> None:
        if not self.size_bytes or len(self.size_bytes) != len(self.seconds):
            raise InputError("seconds", len(self.seconds), "as many as size_bytes, at least one")
        for name, values in (("size_bytes", self.size_bytes), ("seconds", self.seconds)):
            if any(after < before for before, after in itertools.pairwise(values)):
                raise InputError(name, list(values), "ascending numbers")


Tables = dict[str, CollectiveTable]  # tables by number of GPUs of the group ("2", "4", "8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKernels(Spec):
    """Kernels in which one engine differs from those of `GpuEfficiency`; the rest are shared."""

    gemm: dict[str, GemmEfficiency] = field(default_factory=dict)
    grouped_gemm: dict[str, GemmEfficiency] = field(default_factory=dict)
    prefill_attention: PrefillAttentionEfficiency | None = None
    decode_attention: DecodeAttentionEfficiency | None = None
    latent_decode_attention: DecodeAttentionEfficiency | None = None
    all_reduce: Tables = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEfficiency(Spec):
    """
    Efficiencies of a GPU's kernels and links, fitted to measurements or a documented default.

    Attributes:
        gemm: per dtype of the multiplication; at least `bf16`. Of the fastest kernels.
        grouped_gemm: per dtype, GEMMs of experts; not listed: as `gemm`. Of vLLM's kernels, as the
            next two.
        latent_decode_attention: over the latent of MLA; `None`: as decode_attention.
        linear_attention: recurrent layers; `None`: as elementwise.
        elementwise: norms, rotary, activations.
        scale_up_fraction: of `scale_up_bytes_per_s`, large collectives, where there is no table.
        scale_out_fraction: of `scale_out_bytes_per_s`, large transfers.
        collective_latency_s: fixed time of a collective without a table, on 2 GPUs; grows with
            the logarithm of the group.
        all_reduce: tables inside the HB domain, of kernels captured in CUDA graphs.
        all_gather, reduce_scatter: tables; S is the whole.
        all_to_all: tables; S is what one GPU sends.
        sustained_fraction: per dtype of the multiplication, what is left of the compute that the
            op tables show when GEMMs follow one another for long, at the power limit; else 1.
    """

    gemm: dict[str, GemmEfficiency]
    grouped_gemm: dict[str, GemmEfficiency] = field(default_factory=dict)
    prefill_attention: PrefillAttentionEfficiency
    decode_attention: DecodeAttentionEfficiency
    latent_decode_attention: DecodeAttentionEfficiency | None = None
    linear_attention: StreamEfficiency | None = None
    elementwise: StreamEfficiency
    scale_up_fraction: Fraction
    scale_out_fraction: Fraction
    collective_latency_s: NotNegative
    all_reduce: Tables = field(default_factory=dict)
    all_gather: Tables = field(default_factory=dict)
    reduce_scatter: Tables = field(default_factory=dict)
    all_to_all: Tables = field(default_factory=dict)
    engines: dict[str, EngineKernels] = field(default_factory=dict)
    sustained_fraction: dict[str, Fraction] = field(default_factory=dict)
    fitted: bool

    def _check(self) -> None:
        if "bf16" not in self.gemm:
            raise InputError("efficiency.gemm.bf16", None, "the efficiency of bf16 GEMM")

    def of_engine(self, name: str, version: EngineKernels | None = None) -> GpuEfficiency:
        """Return the efficiencies with the kernels of an engine, and those of its *version*."""
        changed: dict[str, Any] = {}
        for own in (self.engines.get(name), version):
            for part in fields(own) if own is not None else ():
                value, shared = getattr(own, part.name), getattr(self, part.name)
                if isinstance(value, dict):
                    value = {**changed.get(part.name, shared), **value} if value else None
                if value is not None:
                    changed[part.name] = value
        return replace(self, **changed) if changed else self
