"""A transformer as the sizer sees it: shapes and dtypes, never weights."""

from __future__ import annotations

from dataclasses import dataclass

from sizing.errors import InputError
from sizing.specs.checks import STRICT, not_negative, one_of, positive

DTYPE_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "fp4": 0.5,
}
"""Bytes of one value; block scales of fp8, int4 and fp4 are left out (at most 6 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """
    Mixture-of-experts feed-forward.

    Attributes:
        num_experts: routed experts per MoE layer.
        experts_per_token: routed experts that one token visits.
        expert_ffn_size: intermediate size of one routed expert.
        num_shared_experts: experts that every token visits.
        shared_ffn_size: intermediate size of all shared experts together.
        num_dense_layers: layers (the first ones) with a dense feed-forward instead.
    """

    __pydantic_config__ = STRICT

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    num_shared_experts: int = 0
    shared_ffn_size: int = 0
    num_dense_layers: int = 0

    def __post_init__(self) -> None:
        """Check the counts."""
        positive(
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_ffn_size=self.expert_ffn_size,
        )
        not_negative(
            num_shared_experts=self.num_shared_experts,
            shared_ffn_size=self.shared_ffn_size,
            num_dense_layers=self.num_dense_layers,
        )
        if self.experts_per_token > self.num_experts:
            raise InputError(
                "moe.experts_per_token", self.experts_per_token, f"at most {self.num_experts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent a token."""

    __pydantic_config__ = STRICT

    q_lora_rank: int
    """0: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        """Check the ranks."""
        not_negative(q_lora_rank=self.q_lora_rank)
        positive(
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """
    One decoder-only transformer.

    Attributes:
        id: the catalog name, hub id or path it was asked for by.
        source: where a server loads it from: a hub id or a directory.
        config_hash: SHA-256 of the canonical architecture, 16 hex digits.
        ffn_size: intermediate size of the dense feed-forward (0 if every layer is MoE).
        gated_mlp: three matrices (SwiGLU) instead of two.
        attention_bias: q, k and v projections carry a bias.
        window_tokens: sliding window; 0: every layer attends to everything.
        num_window_layers: layers that use the window.
        dtype: of activations, and of embeddings, lm_head, norms and routers: never quantised.
        weight_dtype: of the other weights as published, unless the scenario overrides it.
        attention_quantised: attention projections are in `weight_dtype`; else in `dtype`.
        kv_dtype: dtype of the cached keys and values.
    """

    __pydantic_config__ = STRICT

    id: str
    source: str
    config_hash: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context_tokens: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    attention_bias: bool = False
    window_tokens: int = 0
    num_window_layers: int = 0
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    attention_quantised: bool = True
    kv_dtype: str = "bf16"
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        positive(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            max_context_tokens=self.max_context_tokens,
        )
        not_negative(ffn_size=self.ffn_size, window_tokens=self.window_tokens)
        one_of(("bf16", "fp16", "fp32"), dtype=self.dtype)
        one_of(tuple(DTYPE_BYTES), weight_dtype=self.weight_dtype, kv_dtype=self.kv_dtype)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}"
            )
        if not 0 <= self.num_window_layers <= self.num_layers:
            raise InputError(
                "num_window_layers", self.num_window_layers, f"0 to num_layers = {self.num_layers}"
            )
