"""Bytes of the KV cache on one GPU: of a token, and of a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from minicluster.specs.model import DTYPE_BYTES, draft_layer
from minicluster.specs.slicing import Slicing, stage_layers

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec

UNEVEN = 1.5
"""Layers of the most frequent kind over those of the rarest from which vLLM fills no groups up."""

MLA_HYBRID_BLOCK = 128
"""Tokens of which blocks are a multiple where linear layers stand beside latent attention."""

INDEX_SCALE_BYTES = 4
"""Bytes of the scale of a key of the index: one fp32 beside its fp8 values (vLLM 0.29.0)."""


def kv_bytes_per_token(model: ModelSpec, *, tp: int = 1, slicing: Slicing | None = None) -> float:
    """
    KV cache of one token on the fullest GPU, in all layers that keep every token.

        b = 2 L max(1, K / tp) H w;  MLA: L ((r + d_rope) w + d_index + 4)
        (docs/model.md, eq. M2)

    Past tp = K every rank still holds one whole head, so a wider TP no longer saves KV memory;
    the latent of MLA and the key of an index have no heads to slice.

    Args:
        model: L layers, K KV heads, H head dimension, w bytes per value; those of a draft head
            count on every stage.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*; a pipeline stage holds its own layers only.

    Returns:
        Bytes per token and GPU.

    Source:
        vLLM: max(1, total_num_kv_heads // tp) heads a rank.

    Ignores:
        Layers with a sliding window, which keep at most a window, and linear ones (eq. M3);
        layouts of the fp8 latent that keep part of it in 16 bits (656 bytes in place of 576).

    """
    sliced = slicing or Slicing(tp=tp)
    full = model.num_full_layers * _fullest_share(model, sliced)
    size = full * _layer_kv_bytes(model.of_full_layers, tp=sliced.tp)
    if model.draft is not None:
        size += model.draft.num_layers * _layer_kv_bytes(draft_layer(model), tp=sliced.tp)
    return size


def state_bytes(
    model: ModelSpec, *, tp: int = 1, slicing: Slicing | None = None, drafts: int = 0
) -> float:
    """
    State of linear attention of one sequence, on the fullest GPU, however long it is.

        M_l = (1 + k) L_l (N_v d_k d_v w / tp
              + (c - 1 + k) (max(2, 2 N_k / tp) d_k + N_v d_v / tp) a)
        (docs/model.md, eq. M6)

    Args:
        model: shapes.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*.
        drafts: k, tokens verified in a step, each of which leaves a state.

    Source:
        vLLM keeps the recurrent state and the last c - 1 inputs of the convolution, and one more
        of each for every draft (`num_speculative_blocks`).

    Ignores:
        Pages that are padded to the size of attention's.

    """
    spec, sliced = model.linear, slicing or Slicing(tp=tp)
    if spec is None:
        return 0.0
    layer = spec.state_bytes(model.dtype, tp=sliced.tp, drafts=drafts)
    return (1 + drafts) * spec.num_layers * _fullest_share(model, sliced) * layer


def kv_bytes_per_sequence(
    model: ModelSpec,
    tokens: float,
    *,
    tp: int = 1,
    slicing: Slicing | None = None,
    block_size: int,
    drafts: int = 0,
) -> float:
    """
    KV cache of a sequence of *tokens* tokens where each kind of layers has a pool of its own.

        M_s = b c ceil(s / c) + b_window c min(ceil(s / c), ceil(w / c) + 1) + M_l
        (docs/model.md, eq. M3)

    Args:
        model: shapes.
        tokens: s.
        tp: tensor-parallel degree, where nothing else is sliced.
        slicing: in place of *tp*.
        block_size: c.
        drafts: tokens verified in a step; see `state_bytes`.

    Returns:
        Bytes per GPU: what a sequence writes. vLLM's blocks hold more, see `kv_pages`.

    Source:
        Paged attention allocates blocks; windowed layers free those that left the window.

    Ignores:
        Prefixes that sequences share.

    """
    sliced = slicing or Slicing(tp=tp)
    kept = block_size * math.ceil(tokens / block_size)
    state = state_bytes(model, slicing=sliced, drafts=drafts)
    size = kept * kv_bytes_per_token(model, slicing=sliced) + state
    if model.num_window_layers:
        window = block_size * _window_blocks(tokens, model.window_tokens, block_size)
        layers = model.num_window_layers * _fullest_share(model, sliced)
        size += window * layers * _layer_kv_bytes(model, tp=sliced.tp)
    return size


class PageGroup(NamedTuple):
    """
    Layers of one kind whose blocks are allocated together, and how many such groups there are.

    Attributes:
        kind: `full`, `window` or `state`.
        block_tokens: tokens of a block; of a state any.
        number: of such groups; a fraction of blocks of another size where pools are apart.
    """

    kind: str
    block_tokens: int
    number: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """
    How vLLM divides the KV cache of a GPU in blocks of one size, each for one group of layers.

    Attributes:
        block_bytes: of one block, in all layers of a group on the fullest GPU.
        block_tokens: tokens of a block of layers that keep every token.
        states: blocks that a sequence takes in a group of linear layers.
        window_tokens: that windowed layers see.
    """

    block_bytes: float
    block_tokens: int
    groups: tuple[PageGroup, ...]
    states: int
    window_tokens: int

    def blocks(self, tokens: float, *, in_flight: int = 0, spread: float = 0.0) -> float:
        """
        Blocks of a sequence of *tokens* tokens, of all groups.

        Args:
            in_flight: tokens of prompts whose step has not ended: their windows are not freed.
            spread: lengths are spread evenly up to so far from *tokens*: the mean of blocks.
        """
        total = 0.0
        for kind, size, number in self.groups:
            if kind == "state":
                each: float = self.states
            elif kind == "window":
                each = _window_blocks(tokens, self.window_tokens + in_flight, size)
            elif spread:
                each = _mean_blocks(tokens, spread, size)
            else:
                each = math.ceil(tokens / size)
            total += number * each
        return total

    def usable_blocks(self, kv_bytes: float) -> int:
        """Blocks of a cache but for the null block, which no sequence gets."""
        return int(kv_bytes // self.block_bytes) - 1

    @property
    def fixed_blocks(self) -> float:
        """Blocks that a sequence takes however long it is."""
        return sum(self.states * group.number for group in self.groups if group.kind == "state")

    @property
    def growing_blocks(self) -> float:
        """Blocks that every `block_tokens` tokens take, in layers that keep every token."""
        full = (group for group in self.groups if group.kind == "full")
        return sum(group.number * self.block_tokens / group.block_tokens for group in full)


def kv_pages(
    model: ModelSpec,
    *,
    slicing: Slicing,
    block_size: int,
    drafts: int = 0,
    one_pool: bool = True,
) -> KvPages:
    """
    Return the blocks that vLLM divides the KV cache in (docs/model.md, eq. M12).

    Linear layers make blocks so long that a page of attention holds a state, which is padded to
    it. Layers of one kind are divided in groups of as many layers, and a block belongs to one
    group: where kinds have other numbers of layers, the last group of a kind has layers missing.

    Args:
        model: shapes; with drafts in the KV cache those of its draft head, too.
        slicing: of one replica; a pipeline stage holds its share of each group.
        block_size: tokens of a block, as the engine is asked for.
        drafts: tokens verified in a step; each leaves a state.
        one_pool: whether kinds share one pool; else each has its own, and no block is padded.

    Source:
        vLLM 0.29.0 platforms/interface.py `_align_hybrid_block_size`; v1/core/kv_cache_utils.py
        `get_kv_cache_groups`, `unify_kv_cache_spec_page_size`,
        `_get_kv_cache_groups_uniform_page_size`, `_get_kv_cache_bytes_per_block`;
        v1/core/single_type_kv_cache_manager.py: what each kind holds.

    Ignores:
        Layouts with blocks outermost, which pack pages of several sizes; attention backends that
        take other blocks than they are asked for (FlashMLA: 64 tokens); the second state that a
        sequence holds for two steps where it passes the end of a block, and states of cached
        prefixes; which layers lie on which stage.
    """
    if not one_pool:
        return _pages_apart(model, slicing=slicing, block_size=block_size, drafts=drafts)
    page, linear = _layer_kv_bytes(model, tp=slicing.tp), model.linear
    block, state = block_size, 0.0
    if linear is not None:
        state = linear.state_bytes(model.dtype, tp=slicing.tp, drafts=drafts)
        if model.num_attention_layers:
            aligned = max(block_size, MLA_HYBRID_BLOCK if model.mla else 0)
            block = max(block_size, aligned * math.ceil(state / (aligned * page)))
            state = block * page
    layers = {
        ("full", block * page): model.num_full_layers,
        ("window", block * page): model.num_window_layers,
        ("state", state): model.num_linear_layers,
    }
    if model.draft is not None:
        draft = ("full", block * _layer_kv_bytes(draft_layer(model), tp=slicing.tp))
        layers[draft] = layers.get(draft, 0) + model.draft.num_layers
    layers = {each: count for each, count in layers.items() if count}
    kinds, longest = {kind for kind, _ in layers}, max(stage_layers(model.num_layers, slicing.pp))
    largest = max(size for _, size in layers)
    if len(kinds) == 1:  # one group, whose pages may have several sizes
        drafted = model.draft.num_layers * draft[1] if model.draft else 0.0
        own = sum(size * count for (_, size), count in layers.items()) - drafted
        block_bytes = own * longest / model.num_layers + drafted
        groups = tuple(PageGroup(kind, block, 1) for kind in kinds)
    else:
        fewest, most = min(layers.values()), max(layers.values())
        together = most if most < UNEVEN * fewest else fewest
        block_bytes = largest * math.ceil(together * longest / model.num_layers)
        groups = tuple(
            PageGroup(kind, _unified_tokens(block, size, largest), math.ceil(count / together))
            for (kind, size), count in layers.items()
        )
    return KvPages(
        block_bytes=block_bytes,
        block_tokens=block,
        groups=groups,
        states=1 + drafts,
        window_tokens=model.window_tokens,
    )


def _pages_apart(model: ModelSpec, *, slicing: Slicing, block_size: int, drafts: int) -> KvPages:
    """Return the blocks of pools apart (eq. M3), each in those of the first kind there is."""
    windows = model.num_window_layers * _fullest_share(model, slicing)
    sizes = {
        "full": block_size * kv_bytes_per_token(model, slicing=slicing),
        "window": block_size * windows * _layer_kv_bytes(model, tp=slicing.tp),
        "state": state_bytes(model, slicing=slicing, drafts=drafts),
    }
    sizes = {kind: size for kind, size in sizes.items() if size}
    unit = next(iter(sizes.values()))
    return KvPages(
        block_bytes=unit,
        block_tokens=block_size,
        groups=tuple(PageGroup(kind, block_size, size / unit) for kind, size in sizes.items()),
        states=1,
        window_tokens=model.window_tokens,
    )


def _unified_tokens(block: int, size: float, largest: float) -> int:
    """Tokens of a page that is as large as the largest: more of them, or padded."""
    return block if largest % size else block * int(largest // size)


def _window_blocks(tokens: float, window: int, block: int) -> int:
    """Blocks of a windowed layer at most: a window may begin within one."""
    return min(math.ceil(tokens / block), math.ceil(window / block) + 1)


def _mean_blocks(tokens: float, spread: float, block: int) -> float:
    """Blocks of sequences whose lengths lie evenly within *spread* of *tokens*, on average."""

    def integral(length: float) -> float:
        whole = math.ceil(length / block)
        return whole * (length - block * (whole - 1) / 2)

    low, high = max(0.0, tokens - spread), tokens + spread
    return (integral(high) - integral(low)) / (high - low)


def _fullest_share(model: ModelSpec, slicing: Slicing) -> float:
    return max(stage_layers(model.num_layers, slicing.pp)) / model.num_layers


def _layer_kv_bytes(model: ModelSpec, *, tp: int) -> float:
    w = DTYPE_BYTES[model.kv_dtype]
    if model.mla:
        index = model.index.head_dim + INDEX_SCALE_BYTES if model.index else 0
        return (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * w + index
    return 2 * max(1.0, model.num_kv_heads / tp) * model.head_dim * w
