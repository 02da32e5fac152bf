"""What is checked first of a plan's model: parameters, weights, KV cache, sequences that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_bytes_per_token, kv_pages
from minicluster.specs.parameters import num_active_parameters, parameters
from sizing.latency.memory import weight_bytes

if TYPE_CHECKING:
    from minicluster.plan import Plan, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """
    Memory of one GPU of a pool, the fullest one.

    Attributes:
        kv_bytes_per_token: in layers that keep every token (eq. M2).
        state_bytes: that a sequence takes however long it is, in whole blocks (eq. M6, M12).
        block_bytes: of a block of the KV cache in all layers of a group (eq. M12).
        block_tokens: that one holds of layers that keep every token.
        sequences: of mean and of longest length that fit in a replica, by tokens.
    """

    role: str
    weight_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    state_bytes: float
    block_bytes: float
    block_tokens: int
    sequences: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """
    The model of a plan, and its memory in each pool.

    Attributes:
        parameters: all, without a draft head's.
        active_parameters: that one token is multiplied with.
        layers: that cache, by kind: full, window or chunk, state, draft.
        window_tokens: 0: no layer has a window.
    """

    parameters: int
    active_parameters: int
    layers: dict[str, int]
    window_tokens: int
    pools: tuple[PoolMemory, ...]


def model_memory(plan: Plan, mean_tokens: dict[str, float]) -> ModelMemory:
    """
    Return what a plan's model takes, and the sequences that fit (docs/model.md, eq. M1 to M12).

    Args:
        mean_tokens: of a sequence, by role.
    """
    model = plan.inputs.model
    windows = "chunk" if model.chunked_window else "window"
    layers = {
        "full": model.num_full_layers,
        windows: model.num_window_layers,
        "state": model.num_linear_layers,
        "draft": model.draft.num_layers if model.draft else 0,
    }
    return ModelMemory(
        parameters=parameters(model).total,
        active_parameters=num_active_parameters(model),
        layers={kind: number for kind, number in layers.items() if number},
        window_tokens=model.window_tokens if model.num_window_layers else 0,
        pools=tuple(_pool(plan, pool, mean_tokens[pool.role]) for pool in plan.pools),
    )


def _pool(plan: Plan, pool: Pool, mean_tokens: float) -> PoolMemory:
    model, engine = plan.inputs.model, plan.engine
    pages = kv_pages(
        model,
        slicing=pool.slicing,
        block_size=engine.block_size,
        drafts=engine.speculative_tokens,
    )
    usable = pages.usable_blocks(pool.kv_bytes)
    lengths = sorted({max(1, round(mean_tokens)), engine.max_model_len})
    return PoolMemory(
        role=pool.role,
        weight_bytes=weight_bytes(model, slicing=pool.slicing),
        kv_bytes=pool.kv_bytes,
        kv_bytes_per_token=kv_bytes_per_token(model, slicing=pool.slicing),
        state_bytes=pages.fixed_blocks * pages.block_bytes,
        block_bytes=pages.block_bytes,
        block_tokens=pages.block_tokens,
        sequences={each: pool.dp * int(usable // pages.blocks(each)) for each in lengths},
    )
