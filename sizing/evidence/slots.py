"""How many requests a decode pool has room for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sizing.evidence.row import MeasuredRow
    from sizing.evidence.row_config import RowConfig

CROWD = 6, 5
"""Users per decode slot of a replica in recipes that name its slots."""


def decode_slots(row: MeasuredRow, config: RowConfig) -> int:
    """
    Requests that the decode pool of a split row holds at once (docs/model.md, eq. V4).

    The least of what the KV cache holds, what the engine takes in a step, and what the recipe
    behind the number of users allows (`recipe_slots`).

    Args:
        row: a disaggregated closed row.
        config: its machine.

    """
    pool = row.groups[1]
    ranks = pool.slicing.dp
    tokens = (1 - row.length_jitter / 2) * (row.isl + row.osl)
    kept = config.kv_tokens(pool.slicing, tokens) / tokens
    rank = max(1, min(math.floor(kept), config.machine.engine.max_num_seqs))
    slots = rank * ranks
    if config.rules.recipe_users_exceed_slots:
        slots = min(slots, recipe_slots(int(row.amount), pool.replicas, ranks) or slots)
    return pool.replicas * slots


def recipe_slots(users: int, replicas: int, ranks: int) -> int | None:
    """
    Slots of a decode replica, read off the users that a recipe sends.

        users = replicas ceil(1.2 slots),  slots = ranks 2^k

    Args:
        users: of the whole pool.
        replicas: of decode.
        ranks: attention copies of a replica, with as many slots each.

    Returns:
        The slots; `None`: the number of users is not one that such a recipe has.

    Source:
        NVIDIA srt-slurm, recipes/trtllm/h100-fp8: file names and `max_batch_size` say the slots,
        `concurrencies` the users (2 x 64 slots: 154 users; 3 x 16: 60; 3 x 1: 6). Sweeps over
        powers of two (its H200 recipes) are told apart, but for 2 users a replica.

    """
    each, rest = divmod(users, replicas)
    most, least = CROWD
    slots = each * least // most
    batch, uneven = divmod(slots, ranks)
    if rest or uneven or batch < 1 or batch & (batch - 1):
        return None
    return slots if -(-slots * most // least) == each else None
