"""A transformer as the sizer sees it: shapes, dtypes and fingerprint, never weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Spec, Whole, choice

if TYPE_CHECKING:
    from collections.abc import Mapping


ARCHITECTURE_KEYS = frozenset({
    "model_type",
    # width and depth
    "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "tie_word_embeddings",
    "max_position_embeddings", "mlp_bias",
    "n_layer", "n_embd", "n_embed", "n_inner", "n_positions", "seq_length", "ffn_hidden_size",
    "intermediate_size_mlp",
    # attention
    "n_head", "num_kv_heads", "multi_query", "new_decoder_architecture", "parallel_attn",
    "attn_output_gate", "attention_chunk_size", "no_rope_layers", "no_rope_layer_interval",
    "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "qkv_bias",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "sliding_window_pattern",
    # linear attention
    "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "mamba_ssm_dtype",
    # multi-head latent attention
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "index_topk", "index_n_heads", "index_head_dim", "indexer_types", "index_topk_pattern",
    "index_topk_freq",
    # mixture of experts
    "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok",
    "experts_per_token", "moe_intermediate_size", "n_shared_experts",
    "shared_expert_intermediate_size", "first_k_dense_replace", "moe_layer_freq",
    "decoder_sparse_step", "mlp_only_layers", "interleave_moe_layer_step", "moe_layers",
    "shared_intermediate_size", "mlp_layer_types",
    "moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_layer_start_index",
    "moe_layer_end_index", "moe_layer_interval", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "enable_moe_block", "top_k_experts",
    # state-space layers
    "hybrid_override_pattern", "layers_block_type", "attn_layer_indices", "mamba_num_heads",
    "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size",
    "mamba_ssm_cache_dtype", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state",
    "mamba_d_conv", "mamba_d_ssm", "mamba_expand", "mamba_chunk_size",
    # others
    "use_bias", "use_qkv_bias", "use_parallel_residual", "ffn_dim", "word_embed_proj_dim",
    "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers",
    "hidden_size_per_layer_input", "per_layer_config", "use_bidirectional_attention",
})  # fmt: skip
"""Keys that change shapes or work; the reader of `sizing.catalog.huggingface` sees no others."""


def language_model(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the language model's config: keys of a `text_config` go over those outside it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys with the number of multi-token-prediction layers (vLLM 0.29.0, config/speculative.py)."""


def mtp_layers(config: Mapping[str, object]) -> int:
    """Return the multi-token-prediction layers of a checkpoint, or refuse a config of no number."""
    keys = language_model(config)
    for key in MTP_KEYS:
        layers = keys.get(key)
        if layers is not None:
            if not isinstance(layers, int) or layers < 0:
                raise InputError(key, layers, "a whole number, 0 or more")
            return layers
    return 0


def architecture(config: Mapping[str, object]) -> dict[str, object]:
    """Return what shapes the language model; keys that are null count as absent."""
    keys = language_model(config)
    return {key: keys[key] for key in ARCHITECTURE_KEYS & keys.keys() if keys[key] is not None}


def architecture_hash(config: Mapping[str, object]) -> str:
    """
    Fingerprint `architecture` of a Hugging Face config: SHA-256 of its canonical JSON, 16 digits.

    Two configs that differ only in names, token ids, dtypes, quantisation, RoPE settings or the
    version of the library that wrote them have the same fingerprint.
    """
    canonical = json.dumps(architecture(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


DTYPE_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "fp4": 0.5,
}
"""Bytes of one value, without the scales that quantised blocks carry."""

UNQUANTISED = ("bf16", "fp16", "fp32")

ComputeDtype = Annotated[str, choice(*UNQUANTISED)]
Dtype = Annotated[str, choice(*DTYPE_BYTES)]

SCALE_BYTES = {"int8": 2.0, "int4": 2.0, "fp4": 1.0}
"""Bytes of one scale; fp8 has one per 128 x 128 weights or fewer, which is nothing."""

USUAL_GROUP = {"int8": 128, "int4": 128, "fp4": 16}
"""Weights that share a scale where a model does not say: AWQ and GPTQ, NVFP4."""


def weight_value_bytes(dtype: str, group: int = 0) -> float:
    """Bytes of one weight in memory, its share of a scale included (docs/model.md, eq. P5)."""
    if dtype not in SCALE_BYTES:
        return DTYPE_BYTES[dtype]
    return DTYPE_BYTES[dtype] + SCALE_BYTES[dtype] / (group or USUAL_GROUP[dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec(Spec):
    """
    Mixture-of-experts feed-forward.

    Attributes:
        shared_ffn_size: intermediate size of all shared experts together.
        latent_size: width of the routed experts' inputs and outputs, which two projections on
            every GPU make from and to the hidden state (Nemotron 3 Super); 0: they have its width.
        num_dense_layers: layers with a dense feed-forward instead; the first ones, where it
            matters on which pipeline stage they lie.
        redundant_experts: copies of popular experts that the engine's load balancer keeps in each
            layer; `None`: it has none, and experts stay where they are.
    """

    num_experts: Count
    experts_per_token: Count
    expert_ffn_size: Count
    num_shared_experts: Whole = 0
    shared_ffn_size: Whole = 0
    latent_size: Whole = 0
    num_dense_layers: Whole = 0
    redundant_experts: Whole | None = None

    @property
    def num_copies(self) -> int:
        """Experts in memory, copies included, where groups of GPUs hold whole experts."""
        return self.num_experts + (self.redundant_experts or 0)

    def _check(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise InputError(
                "moe.experts_per_token", self.experts_per_token, f"at most {self.num_experts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent a token."""

    q_lora_rank: Whole
    """0: queries are projected directly."""
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec(Spec):
    """
    Heads of layers that attend to everything, where windowed ones have others (Gemma 4).

    Attributes:
        shared_values: the projection of keys makes the values as well; both are cached.
    """

    num_kv_heads: Count
    head_dim: Count
    shared_values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec(Spec):
    """
    Sparse attention by an index (DeepSeek-V3.2, arXiv 2512.02556): the best `top_k` keys are read.

    Attributes:
        head_dim: of the index; one key of that size is cached per token and layer.
        top_k: keys that a query attends to at most.
    """

    num_heads: Count
    head_dim: Count
    top_k: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec(Spec):
    """
    Layers whose attention keeps a state of fixed size instead of keys and values.

    Attributes:
        kind: `delta`: gated delta rule (Qwen3-Next, arXiv 2412.06464), with decay and step size
            projected per value head and a short convolution; `lightning`: lightning attention
            (MiniMax-01, arXiv 2501.08313); `mamba2`: state-space layers (Mamba-2, arXiv
            2405.21060), whose C, B and x are queries, keys and values, with a step size per head.
        num_key_heads: of queries and of keys; groups of a `mamba2` layer.
        key_head_dim: size of a state of `mamba2`.
        conv_kernel: width of the convolution over queries, keys and values; 0: none.
        state_dtype: of the state in the cache.
        chunk_tokens: that prefill handles at once; 64 in flash-linear-attention, which vLLM and
            SGLang use, and as the config says in the kernels of `mamba2`.
    """

    num_layers: Count
    num_key_heads: Count
    num_value_heads: Count
    key_head_dim: Count
    value_head_dim: Count
    kind: Annotated[str, choice("delta", "lightning", "mamba2")] = "delta"
    conv_kernel: Whole = 0
    state_dtype: ComputeDtype = "fp32"
    chunk_tokens: Count = 64

    @property
    def scalars(self) -> int:
        """Numbers projected per token and value head: decay and step size."""
        return {"delta": 2, "mamba2": 1}.get(self.kind, 0)

    @property
    def mixed_size(self) -> int:
        """Queries, keys and values of one token: what the convolution mixes."""
        return round(self.mixed_values(tp=1))

    def mixed_values(self, *, tp: int) -> float:
        """
        Queries, keys and values of one token on one of *tp* GPUs.

            max(2, 2 N_k / tp) d_k + N_v d_v / tp      (docs/model.md, eq. M6)

        Source: vLLM 0.29.0 `mamba2_state_shape`: every GPU holds a whole group.
        """
        keys = 2 * max(1.0, self.num_key_heads / tp) * self.key_head_dim
        return keys + self.num_value_heads * self.value_head_dim / tp

    def recurrent_values(self, *, tp: int) -> float:
        """Values of the recurrent state of one layer and sequence on one of *tp* GPUs."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim / tp

    def convolution_values(self, *, tp: int, drafts: int = 0) -> float:
        """Values that the convolution keeps of one layer and sequence on one of *tp* GPUs."""
        kept = self.conv_kernel - 1 + drafts if self.conv_kernel else 0
        return kept * self.mixed_values(tp=tp)

    def state_bytes(self, dtype: str, *, tp: int, drafts: int = 0) -> float:
        """
        Bytes of the state of one layer and sequence on one of *tp* GPUs (docs/model.md, eq. M6).

        Args:
            dtype: of activations, as which the convolution keeps its last inputs.
            drafts: that a step verifies; the convolution keeps their inputs, too.
        """
        recurrent = self.recurrent_values(tp=tp) * DTYPE_BYTES[self.state_dtype]
        return recurrent + self.convolution_values(tp=tp, drafts=drafts) * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec(Spec):
    """
    The head that drafts tokens for speculative decoding.

    Attributes:
        method: `mtp`: layers of the model's own checkpoint, of the shape of its last one
            (DeepSeek-V3, arXiv 2412.19437, section 2.2); `eagle3`: a dense layer that was trained
            for the model (arXiv 2503.01840).
        source: where a server loads the head from; empty: with the model.
        num_heads: of an `eagle3` head, like the next ones; an `mtp` head has the model's.
    """

    _TABLE: ClassVar[str] = "draft"

    method: Annotated[str, choice("mtp", "eagle3")]
    source: str = ""
    num_layers: Count = 1
    num_heads: Whole = 0
    num_kv_heads: Whole = 0
    head_dim: Whole = 0
    ffn_size: Whole = 0
    vocab_size: Whole = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Spec):
    """
    One decoder-only transformer.

    Attributes:
        id: the catalog name, hub id or path it was asked for by.
        source: where a server loads it from: a hub id or a directory.
        config_hash: `architecture_hash` of its config.
        ffn_size: intermediate size of the dense feed-forward (0 if every layer is MoE).
        gated_mlp: three matrices (SwiGLU) instead of two.
        parallel_attention: attention and feed-forward read the same input side by side and are
            summed once (GPT-J, Falcon).
        shared_values: the projection of keys makes the values as well.
        full_heads: heads of the layers that attend to everything; `None`: as the others'.
        position_rows: rows of the table of positions; 0: positions have none.
        gated_attention: the query projection also makes a gate of the output (Qwen3.5).
        window_tokens: keys that a windowed layer sees; 0: every layer attends to everything.
        chunked_window: the window is a chunk of the sequence (Llama 4), not the last tokens.
        attention_layers: layers with attention over keys; `None`: all but the linear ones. Layers
            may have both, side by side (Falcon-H1), or none (Nemotron-H).
        ffn_layers: layers with a feed-forward; `None`: all of them.
        dtype: of activations, and of embeddings, lm_head, norms and routers: never quantised.
        weight_dtype: of the other weights as published, unless the scenario overrides it.
        weight_group: quantised weights that share a scale, of blocks of fp8 one side; 0: as usual
            for the dtype.
        weight_format: method that the checkpoint is quantised with, as its config names it; empty:
            none, or quantised when it is loaded.
        block_scaled: where weights are fp8, they are scaled in blocks, and activations when they
            are multiplied (DeepSeek); else both once per tensor, activations by the op before.
        attention_quantised: attention projections are in `weight_dtype`; else in `dtype`.
        dense_quantised: the same of dense feed-forwards.
        shared_quantised: the same of shared experts; routed ones always are.
        query_norm: queries and keys are normalised: `head`, each head by itself (Qwen3), `all`,
            all heads together (MiniMax-M2); "": they are not.
        draft: the head that drafts tokens, in memory beside the model; `None`: none is loaded.
    """

    id: str
    source: str
    config_hash: str
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    ffn_size: Whole
    vocab_size: Count
    max_context_tokens: Count
    gated_mlp: bool = True
    tied_embeddings: bool = False
    parallel_attention: bool = False
    shared_values: bool = False
    full_heads: HeadSpec | None = None
    position_rows: Whole = 0
    attention_bias: bool = False
    gated_attention: bool = False
    window_tokens: Whole = 0
    chunked_window: bool = False
    num_window_layers: int = 0
    attention_layers: Whole | None = None
    ffn_layers: Whole | None = None
    dtype: ComputeDtype = "bf16"
    weight_dtype: Dtype = "bf16"
    weight_group: Whole = 0
    weight_format: str = ""
    block_scaled: bool = False
    attention_quantised: bool = True
    dense_quantised: bool = True
    shared_quantised: bool = True
    kv_dtype: Dtype = "bf16"
    query_norm: Annotated[str, choice("", "head", "all")] = ""
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    index: IndexSpec | None = None
    linear: LinearSpec | None = None
    draft: DraftSpec | None = None

    def _check(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}"
            )
        for name, layers in (
            ("num_window_layers", self.num_window_layers),
            ("linear.num_layers", self.num_linear_layers),
            ("attention_layers", self.num_attention_layers),
            ("ffn_layers", self.num_ffn_layers),
            ("moe.num_dense_layers", self.num_dense_layers),
        ):
            if not 0 <= layers <= self.num_layers:
                raise InputError(name, layers, f"0 to num_layers = {self.num_layers}")
        if self.num_full_layers < 0:
            raise InputError(
                "num_window_layers",
                self.num_window_layers,
                "at most the layers that are not linear",
            )
        if self.index and not self.mla:
            raise InputError("index", self.index, "no such table without latent attention")

    @property
    def num_linear_layers(self) -> int:
        """Layers with linear attention."""
        return self.linear.num_layers if self.linear else 0

    @property
    def num_full_layers(self) -> int:
        """Layers that attend to every token."""
        return self.num_attention_layers - self.num_window_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention over keys, of all tokens or of a window."""
        others = self.num_layers - self.num_linear_layers
        return others if self.attention_layers is None else self.attention_layers

    @property
    def num_ffn_layers(self) -> int:
        """Layers with a feed-forward."""
        return self.num_layers if self.ffn_layers is None else self.ffn_layers

    @property
    def of_full_layers(self) -> ModelSpec:
        """The model with the heads of its layers that attend to everything in all of them."""
        if self.full_heads is None:
            return self
        return replace(self, full_heads=None, **asdict(self.full_heads))

    @property
    def kinds_of_heads(self) -> tuple[tuple[int, ModelSpec], ...]:
        """Layers with attention over keys, by their heads: how many, and the model of such ones."""
        if self.full_heads is None:
            return ((self.num_attention_layers, self),)
        windowed = replace(self, full_heads=None)
        return ((self.num_full_layers, self.of_full_layers), (self.num_window_layers, windowed))

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense feed-forward."""
        return self.moe.num_dense_layers if self.moe else self.num_ffn_layers

    @property
    def num_expert_layers(self) -> int:
        """Layers with a mixture of experts."""
        return self.num_ffn_layers - self.num_dense_layers

    @property
    def expert_width(self) -> int:
        """Width of what the routed experts take and give."""
        return (self.moe.latent_size if self.moe else 0) or self.hidden_size

    @property
    def num_mixed_layers(self) -> int:
        """Layers with attention over keys, a linear state, or both."""
        return min(self.num_layers, self.num_attention_layers + self.num_linear_layers)

    @property
    def attention_dtype(self) -> str:
        """Dtype of the attention projections."""
        return self.weight_dtype if self.attention_quantised else self.dtype

    @property
    def dense_dtype(self) -> str:
        """Dtype of dense feed-forwards."""
        return self.weight_dtype if self.dense_quantised else self.dtype

    @property
    def shared_dtype(self) -> str:
        """Dtype of shared experts."""
        return self.weight_dtype if self.shared_quantised else self.dtype


def draft_layer(model: ModelSpec) -> ModelSpec:
    """
    Return what one draft pass runs, as a model: one layer, and the output projection.

    An `mtp` head shares the model's tables; checkpoints in 4 bits keep it in 16. An `eagle3` head
    is dense, in 16 bits, and has a smaller output projection of its own.
    """
    draft = model.draft
    if draft is None:
        raise ValueError(f"{model.id} has no draft head")
    changes: dict[str, Any] = {
        "draft": None,
        "num_layers": 1,
        "num_window_layers": 0,
        "window_tokens": 0,
        "attention_layers": None,
        "ffn_layers": None,
        "full_heads": None,
        "position_rows": 0,
        "linear": None,
        "moe": model.moe and replace(model.moe, num_dense_layers=0),
    }
    if draft.method == "eagle3":
        shapes = ("num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")
        plain = ("attention_bias", "gated_attention", "tied_embeddings", "block_scaled")
        changes |= {name: getattr(draft, name) for name in shapes}
        changes |= dict.fromkeys(("moe", "mla", "index")) | dict.fromkeys(plain, False)
        changes |= {"gated_mlp": True, "query_norm": ""}
    if draft.method == "eagle3" or DTYPE_BYTES[model.weight_dtype] < 1:
        changes |= {"weight_dtype": model.dtype, "weight_group": 0, "weight_format": ""}
        changes |= {"block_scaled": False}
    return replace(model, **changes)


def with_weight_dtype(model: ModelSpec, dtype: str | None) -> ModelSpec:
    """
    Return *model* with its weights in another dtype; itself where *dtype* is `None`.

    16 and 32 bits are the dtype of everything; narrower ones that of the quantised parts, and keys
    and values are cached as the model computes.
    """
    if dtype in UNQUANTISED:
        return replace(
            model,
            dtype=dtype,
            weight_dtype=dtype,
            kv_dtype=dtype,
            attention_quantised=True,
            dense_quantised=True,
            shared_quantised=True,
            weight_group=0,
            weight_format="",
        )
    if dtype is None or dtype == model.weight_dtype:
        return model
    return replace(
        model, weight_dtype=dtype, kv_dtype=model.dtype, weight_group=0, weight_format=""
    )
