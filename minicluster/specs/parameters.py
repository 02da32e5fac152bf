"""Parameters of a model, by the part they sit in."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """
    Counts over all layers of one copy of the model.

    Attributes:
        embedding: input table; looked up, never multiplied.
        lm_head: output projection; 0 where it shares the input table.
        attention: query, key, value and output projections with their biases.
        router: scores of the routed experts, and projections to and from their width.
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
        return sum(astuple(self))


def parameters(model: ModelSpec) -> Parameters:
    """
    Count the parameters of *model*.

        P = V D (2, or 1 if tied) + R D + L_a A + L_l A_l + L_d F_d
            + L_m (E F_e + F_s + D (E + 2 r_e)) + D (L_x + L_d + L_m + 1)   (docs/model.md, eq. P1)

    Args:
        model: gives V = vocab_size, R = position_rows, D = hidden_size; A is attention per layer,
            A_l linear attention, F a feed-forward (3 D f gated, 2 D f plain), E the routed experts,
            of the width r_e in place of D where there is one.

    Source: The layers' definitions; totals checked against the published ones in
    tests/published/parameter_counts.toml.

    Ignores: Norms of queries and keys, extra norms, attention sinks, decays of linear attention,
    biases of output projections, feed-forwards, heads and routers (0.1 % together at most);
    multi-token-prediction layers; towers for images or sound.
    """
    D, V, moe = model.hidden_size, model.vocab_size, model.moe
    num_moe_layers = model.num_expert_layers
    matrices = 3 if model.gated_mlp else 2
    return Parameters(
        embedding=(V + model.position_rows) * D,
        lm_head=0 if model.tied_embeddings else V * D,
        attention=sum(n * attention_parameters(of) for n, of in model.kinds_of_heads)
        + model.num_linear_layers * linear_attention_parameters(model),
        dense_ffn=model.num_dense_layers * matrices * D * model.ffn_size,
        experts=num_moe_layers
        * matrices
        * model.expert_width
        * moe.num_experts
        * moe.expert_ffn_size
        if moe
        else 0,
        shared_experts=num_moe_layers * matrices * D * moe.shared_ffn_size if moe else 0,
        router=num_moe_layers * D * (moe.num_experts + 2 * moe.latent_size) if moe else 0,
        norms=D * (model.num_mixed_layers + model.num_ffn_layers + 1),
    )


def attention_parameters(model: ModelSpec) -> int:
    """
    Count the attention parameters of one layer.

        A = D H (N + 2 K) + N H D + biases             grouped-query (docs/model.md, eq. P2)
        A = D r_q + r_q N (d_n + d_r)                  latent: queries (eq. P3)
            + D (r_kv + d_r) + r_kv N (d_n + d_v)      keys and values
            + N d_v D                                  output
            + r_q N_i d_i + D (d_i + N_i)              index, if sparse

    Args:
        model: gives D = hidden_size, N = num_heads, K = num_kv_heads, H = head_dim; for latent
            attention r = lora_rank, d_n = qk_nope_head_dim, d_r = qk_rope_head_dim,
            d_v = v_head_dim, N_i and d_i the heads of the index. Without r_q queries take
            D N (d_n + d_r). Gated attention has 2 N instead of N query heads in the projection, and
            shared values K instead of 2 K.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, for latent attention.
    """
    D, N, K, H = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    if model.mla is None:
        keys = K * (1 if model.shared_values else 2)
        made = H * (N * (2 if model.gated_attention else 1) + keys)
        return D * made + N * H * D + (made if model.attention_bias else 0)
    m = model.mla
    query = N * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    queries = D * m.q_lora_rank + m.q_lora_rank * query if m.q_lora_rank else D * query
    latent = D * (m.kv_lora_rank + m.qk_rope_head_dim)
    heads = m.kv_lora_rank * N * (m.qk_nope_head_dim + m.v_head_dim)
    return queries + latent + heads + N * m.v_head_dim * D + _index_parameters(model)


def _index_parameters(model: ModelSpec) -> int:
    """Count the parameters of the index of one layer (eq. P3)."""
    i, m = model.index, model.mla
    if i is None or m is None:
        return 0
    made_from = m.q_lora_rank or model.hidden_size
    return made_from * i.num_heads * i.head_dim + model.hidden_size * (i.head_dim + i.num_heads)


def linear_attention_parameters(model: ModelSpec) -> int:
    """
    Count the parameters of one layer of linear attention.

        A_l = D (2 N_k d_k + 2 N_v d_v + g N_v) + N_v d_v D + c (2 N_k d_k + N_v d_v)
                                                            (docs/model.md, eq. P6)

    Args:
        model: gives N_k, N_v heads and d_k, d_v dimensions of keys and values, and c, the width
            of the convolution; g is 2 for the gated delta rule (decay and step size), 1 for
            Mamba-2 (step size), 0 for lightning attention. Queries and keys, values and the
            output gate, output.

    Source: Qwen3-Next, MiniMax and Mamba-2 in transformers 5.19.0.
    """
    spec, D = model.linear, model.hidden_size
    if spec is None:
        return 0
    values = spec.num_value_heads * spec.value_head_dim
    made = spec.mixed_size + values + spec.scalars * spec.num_value_heads
    return D * made + values * D + spec.conv_kernel * spec.mixed_size


def num_active_parameters(model: ModelSpec) -> int:
    """
    Count the parameters that one token is multiplied with.

        P_a = P - V D - (1 - k / E) L_m E F_e (+ V D if tied)      (docs/model.md, eq. P4)

    Args:
        model: k = experts_per_token of E = num_experts routed experts are visited.

    A token takes twice as many FLOPs, attention scores apart.

    Source: gpt-oss (arXiv 2508.10925, table 1) is counted so, without the input table.
    """
    p = parameters(model)
    head = model.vocab_size * model.hidden_size
    visited = p.experts * model.moe.experts_per_token // model.moe.num_experts if model.moe else 0
    return p.total - p.embedding - p.lm_head - p.experts + head + visited
