"""Parameters of a model, by the part they sit in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing.specs.model import DTYPE_BYTES

if TYPE_CHECKING:
    from sizing.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """
    Counts over all layers of one copy of the model.

    Attributes:
        embedding: input table; looked up, never multiplied.
        lm_head: output projection; 0 where it shares the input table.
        attention: query, key, value and output projections with their biases.
        dense_ffn: feed-forward of the layers without experts.
        experts: routed experts.
        shared_experts: experts that every token visits.
        router: scores of the routed experts.
        norms: two per layer and the last one.
    """

    embedding: int
    lm_head: int
    attention: int
    dense_ffn: int
    experts: int
    shared_experts: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        """All of them."""
        return (
            self.embedding + self.lm_head + self.attention + self.dense_ffn
            + self.experts + self.shared_experts + self.router + self.norms
        )  # fmt: skip


def parameters(model: ModelSpec) -> Parameters:
    """
    Count the parameters of *model*.

        P = V D (2, or 1 if tied) + L A + L_d F_d + L_m (E F_e + F_s + D E) + D (2 L + 1)
                                                            (docs/model.md, eq. P1)

    Args:
        model: gives V = vocab_size, D = hidden_size, L = num_layers; A is attention per layer,
            F a feed-forward (3 D f gated, 2 D f plain), E the routed experts.

    Returns:
        The counts by part.

    Source:
        The layers' definitions; totals checked against the published ones in
        tests/published/parameter_counts.toml.

    Ignores:
        Norms of queries and keys, extra norms, attention sinks, biases of the output projection,
        of experts and of routers (0.1 % together at most); multi-token-prediction layers; towers
        for images or sound.

    """
    D, V, L = model.hidden_size, model.vocab_size, model.num_layers
    moe = model.moe
    num_moe_layers = L - moe.num_dense_layers if moe else 0
    matrices = 3 if model.gated_mlp else 2
    return Parameters(
        embedding=V * D,
        lm_head=0 if model.tied_embeddings else V * D,
        attention=L * attention_parameters(model),
        dense_ffn=(L - num_moe_layers) * matrices * D * model.ffn_size,
        experts=num_moe_layers * matrices * D * moe.num_experts * moe.expert_ffn_size if moe else 0,
        shared_experts=num_moe_layers * matrices * D * moe.shared_ffn_size if moe else 0,
        router=num_moe_layers * D * moe.num_experts if moe else 0,
        norms=D * (2 * L + 1),
    )


def attention_parameters(model: ModelSpec) -> int:
    """
    Count the attention parameters of one layer.

        A = D H (N + 2 K) + N H D + biases             grouped-query (docs/model.md, eq. P2)
        A = D r_q + r_q N (d_n + d_r)                  latent: queries (eq. P3)
            + D (r_kv + d_r) + r_kv N (d_n + d_v)      keys and values
            + N d_v D                                  output

    Args:
        model: gives D = hidden_size, N = num_heads, K = num_kv_heads, H = head_dim; for latent
            attention r = lora_rank, d_n = qk_nope_head_dim, d_r = qk_rope_head_dim,
            d_v = v_head_dim. Without r_q queries take D N (d_n + d_r).

    Returns:
        Parameters, with the biases of q, k and v where the model has them.

    Source:
        DeepSeek-V2 (arXiv 2405.04434), section 2.1, for latent attention.

    Ignores:
        See `parameters`.

    """
    D, N, K, H = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    if model.mla is None:
        bias = H * (N + 2 * K) if model.attention_bias else 0
        return D * H * (N + 2 * K) + N * H * D + bias
    m = model.mla
    query = N * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    queries = D * m.q_lora_rank + m.q_lora_rank * query if m.q_lora_rank else D * query
    latent = D * (m.kv_lora_rank + m.qk_rope_head_dim)
    heads = m.kv_lora_rank * N * (m.qk_nope_head_dim + m.v_head_dim)
    return queries + latent + heads + N * m.v_head_dim * D


def num_parameters(model: ModelSpec) -> int:
    """Count all parameters of *model*; see `parameters`."""
    return parameters(model).total


def num_active_parameters(model: ModelSpec) -> int:
    """
    Count the parameters that one token is multiplied with.

        P_a = P - V D - (1 - k / E) L_m E F_e (+ V D if tied)      (docs/model.md, eq. P4)

    Args:
        model: k = experts_per_token of E = num_experts routed experts are visited.

    Returns:
        Parameters; twice as many FLOPs per token, attention scores apart.

    Source:
        As published for gpt-oss (arXiv 2508.10925, table 1): the input table is not counted.

    Ignores:
        See `parameters`.

    """
    p = parameters(model)
    head = p.lm_head or p.embedding
    visited = p.experts * model.moe.experts_per_token // model.moe.num_experts if model.moe else 0
    return p.total - p.embedding - p.lm_head - p.experts + head + visited


def weight_bytes(model: ModelSpec) -> float:
    """
    Bytes of one copy of the weights.

        M = w (P_att + P_ffn + P_experts) + a (P_tables + P_router + P_norms)
                                                            (docs/model.md, eq. P5)

    Args:
        model: w is the size of its `weight_dtype`, a of its `dtype`; attention takes a where it
            is not quantised.

    Returns:
        Bytes, all GPUs of a replica together.

    Source:
        What checkpoints leave unquantised: `modules_to_not_convert` and `ignore` of published
        quantization_configs.

    Ignores:
        Block scales (see `DTYPE_BYTES`); what tensor parallelism replicates.

    """
    p = parameters(model)
    w, a = DTYPE_BYTES[model.weight_dtype], DTYPE_BYTES[model.dtype]
    attention = p.attention * (w if model.attention_quantised else a)
    ffn = w * (p.dense_ffn + p.experts + p.shared_experts)
    return attention + ffn + a * (p.embedding + p.lm_head + p.router + p.norms)
