"""Attention and feed-forward of a config's layers: which see what, dense size, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from minicluster.errors import InputError
from minicluster.specs.model import HeadSpec, IndexSpec, LinearSpec, MlaSpec, MoeSpec

if TYPE_CHECKING:
    from sizing.catalog.huggingface.families import Family


@dataclass(frozen=True, slots=True)
class Keys:
    """
    The keys of one file (`place`), with what their family assumes where one is absent.

    A key that is null is there, and says that there is none of it.

    Attributes:
        names: a family's own keys by the ones that we read in their place.
    """

    values: Mapping[str, object]
    defaults: Mapping[str, object]
    place: str
    names: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> object:
        """Return what the file or the family says; `None` if neither does."""
        for keys in (self.values, self.defaults):
            for each in (self.names.get(name, name), name):
                if each in keys:
                    return keys[each]
        return None

    def has(self, name: str) -> bool:
        """Say whether the key is there, in the file or by default."""
        return self.get(name) is not None

    def count(self, name: str, otherwise: int | None = None) -> int:
        """Return a whole number; *otherwise* where the key has no value, nor by default."""
        value = self.get(name)
        if value is None and replace(self, values={}).get(name) is None:
            value = otherwise
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(name, "a whole number, zero or more")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; false where the key is absent."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise self.wrong(name, "true or false")
        return bool(value)

    def sequence(self, name: str) -> list[object]:
        """Return a list; empty where the key is absent."""
        value = self.get(name)
        if not isinstance(value, list | None):
            raise self.wrong(name, "a list")
        return value or []

    def only(self, name: str, allowed: object, why: str) -> None:
        """Refuse the model if the key says anything else than nothing or what is allowed."""
        if self.get(name) not in (None, False, 0, allowed):
            raise self.wrong(name, why)

    def wrong(self, name: str, expectation: str) -> InputError:
        """Return the error for a key."""
        own = name if name in self.values else self.names.get(name, name)
        return InputError(f"{self.place}: {own}", self.get(name), expectation)


STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, BOTH, EXPERTS, DENSE = "linear_attention", "hybrid", "moe", "mlp"
INDEXED = "indexed_attention"
WINDOWED = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}
"""Kinds of layers that see a window, and the key with its size."""

LEGACY = {
    "mamba": LINEAR,
    "attention": FULL,
    "deepseek_sparse_attention": INDEXED,
}
"""Kinds of layers by their former names (transformers 5.19.0, configuration_utils.py)."""

PATTERN = {"M": LINEAR, "*": FULL, "E": EXPERTS, "-": DENSE}
"""Kinds of Nemotron-H's layers, each with one of mixer and feed-forward, by their letters."""


class Layers(NamedTuple):
    """
    The kind of each layer, and the window that some have.

    Attributes:
        single: each layer is a mixer or a feed-forward, not both.
    """

    kinds: list[str]
    single: bool = False
    window_tokens: int = 0
    chunked: bool = False

    def num(self, *kinds: str) -> int:
        """Count the layers of these kinds."""
        return sum(kind in kinds for kind in self.kinds)

    @property
    def num_windowed(self) -> int:
        """Layers with the window."""
        return self.num(WINDOW, CHUNK) if self.window_tokens else 0

    @property
    def num_linear(self) -> int:
        """Layers with a linear state."""
        return self.num(LINEAR, BOTH)

    @property
    def attention_layers(self) -> int | None:
        """Layers with attention over keys, where others than the linear ones have none as well."""
        attending = len(self.kinds) - self.num(LINEAR, EXPERTS, DENSE)
        return attending if self.single or self.num(BOTH) else None

    @property
    def ffn_layers(self) -> int | None:
        """Layers with a feed-forward, where some have none."""
        return self.num(EXPERTS, DENSE) if self.single else None


def read_kinds(keys: Keys, family: Family) -> list[str]:
    """Return the kind of each layer, by the rule of the family where the config is silent."""
    return _named(keys, family) or _ruled(keys, family)


def read_layers(keys: Keys, family: Family, kinds: list[str], context: int) -> Layers:
    """
    Find the window of the layers that have one.

    Args:
        kinds: kinds of the layers.
        context: longest sequence; a window at least as long is none.
    """
    kind = CHUNK if CHUNK in kinds else WINDOW
    window = keys.count(WINDOWED[kind], 0) if keys.has(WINDOWED[kind]) else 0
    if keys.get("use_sliding_window") is False and "use_sliding_window" in keys.defaults:
        window = 0
    if keys.has("global_head_dim"):  # layers with a window have heads of their own, however long
        window = min(window or context, context)
    elif not 0 < window < context:
        window = 0
    if not window or kind not in kinds:
        return Layers(kinds, single=family.layers == "letters")
    return Layers(kinds, window_tokens=window, chunked=kind == CHUNK)


def _named(keys: Keys, family: Family) -> list[str]:
    known = [WINDOW, FULL]
    for kind, is_known in (
        (CHUNK, keys.has("attention_chunk_size")),
        (LINEAR, bool(family.linear)),
        (INDEXED, keys.has("index_topk")),
        (BOTH, family.layers == "hybrid"),
        (EXPERTS, family.layers == "letters"),
        (DENSE, family.layers == "letters"),
    ):
        known += [kind] * is_known
    if any(kind != 1 for kind in keys.sequence("attn_type_list")):
        raise keys.wrong("attn_type_list", "1 for every layer, attention over all keys")
    name = "layer_types" if keys.has("layer_types") else "layers_block_type"
    kinds = keys.sequence(name)
    for layer, found in enumerate(kinds):
        if LEGACY.get(str(found), found) not in known:
            place = f"{keys.place}: {name}[{layer}]"
            raise InputError(place, found, "one of " + ", ".join(known))
    kinds = [LEGACY.get(str(kind), str(kind)) for kind in kinds]
    layers = keys.count("num_hidden_layers", len(kinds))
    if kinds and len(kinds) != layers:
        raise keys.wrong(name, f"{layers} entries")
    if kinds and keys.has("global_head_dim") and kinds[-1] != FULL:
        raise keys.wrong(name, f"{FULL} in the last layer, as the library builds it")
    return [str(kind) for kind in kinds]


def _ruled(keys: Keys, family: Family) -> list[str]:
    """Return the kind of each layer by the rule of the family (transformers 5.19.0)."""
    if family.layers == "letters":
        return _letters(keys)
    layers, rule = range(keys.count("num_hidden_layers")), RULES.get(family.layers)
    if rule is None:
        return [ALIKE.get(family.layers, FULL)] * len(layers)
    kinds = [rule(keys, layer) for layer in layers]
    return [*kinds[:-1], FULL] if keys.has("global_head_dim") and kinds else kinds


ALIKE = {"all": WINDOW, "linear": LINEAR, "hybrid": BOTH, "indexed": INDEXED}
"""Rules by which layers are all of one kind."""

RULES: dict[str, Callable[[Keys, int], str]] = {
    "above": lambda keys, at: WINDOW if at >= keys.count("max_window_layers") else FULL,
    "below": lambda keys, at: (
        WINDOW if at < keys.count("max_window_layers") and at % 2 == 0 else FULL
    ),
    "pattern": lambda keys, at: (
        WINDOW if (at + 1) % max(1, keys.count("sliding_window_pattern")) else FULL
    ),
    "interval": lambda keys, at: (
        LINEAR if (at + 1) % max(1, keys.count("full_attention_interval")) else FULL
    ),
    "alternate": lambda _, at: LINEAR if at % 2 else FULL,
    "chunks": lambda keys, at: CHUNK if _is_rotated(keys, at) else FULL,
    "unrotated": lambda keys, at: FULL if _is_rotated(keys, at) else WINDOW,
    "indices": lambda keys, at: FULL if at in keys.sequence("attn_layer_indices") else LINEAR,
}
"""Rules by the number of a layer."""


def _is_rotated(keys: Keys, layer: int) -> bool:
    given = keys.sequence("no_rope_layers")
    if given and len(given) != keys.count("num_hidden_layers"):
        raise keys.wrong("no_rope_layers", f"{keys.count('num_hidden_layers')} entries")
    every = max(1, keys.count("no_rope_layer_interval"))
    return bool(given[layer]) if given else (layer + 1) % every != 0


def _letters(keys: Keys) -> list[str]:
    """Return the kind of each layer of Nemotron-H, which has one mixer or feed-forward a layer."""
    letters = keys.get("hybrid_override_pattern")
    if not isinstance(letters, str) or not set(letters) <= PATTERN.keys():
        raise keys.wrong("hybrid_override_pattern", "a string of " + ", ".join(PATTERN))
    layers = keys.count("num_hidden_layers", len(letters))
    if len(letters) != layers:
        raise keys.wrong("hybrid_override_pattern", f"{layers} letters")
    return [PATTERN[letter] for letter in letters]


def read_full_heads(keys: Keys, layers: Layers) -> HeadSpec | None:
    """Read the heads of layers that attend to everything, where windowed ones have others."""
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        keys.only(key, 0, "0: inputs of each layer's own and shared keys are not modelled")
    if not keys.has("global_head_dim"):
        return None
    shared = keys.flag("attention_k_eq_v")
    heads = keys.count("num_key_value_heads")
    if not keys.has("per_layer_config"):
        return HeadSpec(
            num_kv_heads=keys.count("num_global_key_value_heads", heads) if shared else heads,
            head_dim=keys.count("global_head_dim"),
            shared_values=shared,
        )
    name = "per_layer_config"  # in its place where transformers 5 wrote the file
    written = keys.get(name)
    written = written if isinstance(written, dict) else {}
    full = {str(layer) for layer, kind in enumerate(layers.kinds) if kind == FULL}
    each, at = list(written.values()), {str(layer).lstrip("0") or "0" for layer in written}
    if not each or at != full or each != each[:1] * len(each) or not isinstance(each[0], dict):
        raise keys.wrong(name, f"the same for each layer of {FULL}, and for no other")
    own = Keys(
        each[0],
        {"num_key_value_heads": heads, "head_dim": keys.count("head_dim")},
        f"{keys.place}: {name}",
    )
    return HeadSpec(
        num_kv_heads=own.count("num_key_value_heads"),
        head_dim=own.count("head_dim"),
        shared_values=shared,
    )


def read_latent(keys: Keys, family: Family) -> MlaSpec | None:
    """Read multi-head latent attention, if the family has it."""
    if not family.latent_attention:
        return None
    return MlaSpec(
        q_lora_rank=keys.count("q_lora_rank", 0) if keys.has("q_lora_rank") else 0,
        kv_lora_rank=keys.count("kv_lora_rank"),
        qk_nope_head_dim=keys.count("qk_nope_head_dim"),
        qk_rope_head_dim=keys.count("qk_rope_head_dim"),
        v_head_dim=keys.count("v_head_dim"),
    )


def read_index(keys: Keys) -> IndexSpec | None:
    """Read the index of sparse attention, if there is one in every layer."""
    if not keys.has("index_topk"):
        return None
    if any(kind != "full" for kind in keys.sequence("indexer_types")):
        raise keys.wrong("indexer_types", "full in every layer: shared ones are not known")
    for key in ("index_topk_pattern", "index_topk_freq"):
        if keys.get(key) not in (None, 1, []):
            raise keys.wrong(key, "1 or nothing: an index of its own in every layer")
    return IndexSpec(
        num_heads=keys.count("index_n_heads"),
        head_dim=keys.count("index_head_dim"),
        top_k=keys.count("index_topk"),
    )


def read_linear(keys: Keys, family: Family, num_layers: int, dtype: str) -> LinearSpec | None:
    """
    Read linear attention, if any layer has it.

    Args:
        dtype: dtype of activations.

    Source:
        vLLM 0.29.0 model_executor/models/config.py: the state is kept in what the config or its
        class says, else as activations are.
    """
    if not num_layers:
        return None
    key = "mamba_ssm_dtype" if family.linear == "delta" else "mamba_ssm_cache_dtype"
    named = keys.get(key)
    if named is not None and str(named) not in STATE_DTYPES:
        raise keys.wrong(key, "one of " + ", ".join(STATE_DTYPES))
    state_dtype = dtype if named is None else STATE_DTYPES[str(named)]
    if family.linear == "lightning":
        heads = keys.count("num_attention_heads")
        size = keys.count("head_dim", keys.count("hidden_size") // max(heads, 1))
        return LinearSpec(
            num_layers=num_layers, num_key_heads=heads, num_value_heads=heads,
            key_head_dim=size, value_head_dim=size, kind="lightning", state_dtype=state_dtype,
        )  # fmt: skip
    if family.linear == "mamba2":
        return LinearSpec(
            num_layers=num_layers,
            num_key_heads=keys.count("n_groups"),
            num_value_heads=keys.count("mamba_num_heads"),
            key_head_dim=keys.count("ssm_state_size"),
            value_head_dim=_mamba_head_dim(keys),
            kind="mamba2",
            conv_kernel=keys.count("conv_kernel"),
            chunk_tokens=keys.count("chunk_size"),
            state_dtype=state_dtype,
        )
    return LinearSpec(
        num_layers=num_layers,
        num_key_heads=keys.count("linear_num_key_heads"),
        num_value_heads=keys.count("linear_num_value_heads"),
        key_head_dim=keys.count("linear_key_head_dim"),
        value_head_dim=keys.count("linear_value_head_dim"),
        conv_kernel=keys.count("linear_conv_kernel_dim"),
        state_dtype=state_dtype,
    )


def _mamba_head_dim(keys: Keys) -> int:
    """Return the size of a head of a Mamba-2 layer; its heads together are as wide as it says."""
    if "mamba_n_heads" not in keys.defaults:
        return keys.count("mamba_head_dim")
    heads = keys.count("mamba_num_heads")
    inner = keys.count("mamba_expand") * keys.count("hidden_size")
    inner = keys.count("mamba_d_ssm") if keys.has("mamba_d_ssm") else inner
    if keys.get("mamba_head_dim") == "auto":
        return inner // max(1, heads)
    if keys.count("mamba_head_dim") * heads != inner:
        raise keys.wrong("mamba_head_dim", f"{inner} / {heads}, the width of a head")
    return keys.count("mamba_head_dim")


def read_experts(keys: Keys, family: Family, layers: Layers) -> MoeSpec | None:
    """Read the experts, if there are any."""
    if not family.experts or not keys.has("num_experts") or not keys.count("num_experts"):
        return None
    if layers.single and not layers.num(EXPERTS):
        return None
    if keys.get("enable_moe_block") is False:
        return None
    for key in ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"):
        keys.only(key, 1, "1: experts in every layer after the dense ones")
    size = keys.count(family.expert_ffn)
    num_shared = keys.count("n_shared_experts", 0) if keys.has("n_shared_experts") else 0
    whole = keys.has(family.shared_ffn)
    shared_size = keys.count(family.shared_ffn) if whole else num_shared * size
    return MoeSpec(
        num_experts=keys.count("num_experts"),
        experts_per_token=keys.count("num_experts_per_tok"),
        expert_ffn_size=size,
        num_shared_experts=num_shared or int(shared_size > 0),
        shared_ffn_size=shared_size,
        latent_size=keys.count("moe_latent_size", 0),
        num_dense_layers=_dense_layers(keys, layers),
    )


def _dense_layers(keys: Keys, layers: Layers) -> int:
    number = len(layers.kinds)
    if layers.single:
        return layers.num(DENSE)
    if keys.has("moe_layers"):
        return number - len(keys.sequence("moe_layers"))
    if keys.has("interleave_moe_layer_step"):
        return number - number // max(1, keys.count("interleave_moe_layer_step"))
    if keys.has("mlp_layer_types"):
        return _first_dense(keys, number)
    if keys.has("moe_layer_start_index"):
        if keys.get("moe_layer_end_index") not in (-1, number - 1):
            raise keys.wrong("moe_layer_end_index", f"-1 or {number - 1}, the last layer")
        return keys.count("moe_layer_start_index")
    dense = keys.sequence("mlp_only_layers")
    if dense != list(range(len(dense))):
        raise keys.wrong("mlp_only_layers", "the first layers only")
    return keys.count("first_k_dense_replace", len(dense))


def _first_dense(keys: Keys, layers: int) -> int:
    """Count the dense layers of a list of kinds, which have to be the first ones."""
    kinds = keys.sequence("mlp_layer_types")
    first = kinds.count("dense")
    if kinds != ["dense"] * first + ["sparse"] * (layers - first):
        raise keys.wrong("mlp_layer_types", f"{layers} entries, dense ones before sparse ones")
    return first


def read_dense_size(keys: Keys, family: Family, moe: MoeSpec | None) -> int:
    """Return the dense feed-forward's size; 0 where every layer has experts."""
    if moe and not moe.num_dense_layers:
        return 0
    otherwise = None if family.gated_mlp else 4 * keys.count("hidden_size")
    whole = family.experts and moe is None and "shared_intermediate_size" in keys.defaults
    return keys.count("shared_intermediate_size" if whole else family.dense_ffn, otherwise)
