"""Prefix hits by capacity: one pass over a run's prompts by stack distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minicluster.engine_model.kv_offload import MOST_BLOCKS
from minicluster.workload.arrivals import CONTENT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.workload.arrivals import Arrivals
    from sizing.simulation.outcome import Outcome

CAPACITIES = 16
"""Most capacities of a table."""


class HitRate(NamedTuple):
    """Share of all prompt tokens that replicas of a capacity in tokens find."""

    capacity_tokens: int
    hit_fraction: float


def prompt_blocks(arrivals: Arrivals) -> list[Sequence[int]]:
    """Return the names of each prompt's whole blocks of 512 tokens; none where none are known."""
    if arrivals.content is not None:
        return list(arrivals.content)
    if arrivals.session is None:
        return [()] * len(arrivals)
    whole = np.minimum(arrivals.input_tokens // CONTENT_TOKENS, MOST_BLOCKS).tolist()
    sessions = arrivals.session.tolist()
    return [
        range(session * MOST_BLOCKS, session * MOST_BLOCKS + blocks) if session >= 0 else ()
        for session, blocks in zip(sessions, whole, strict=True)
    ]


class StackDistances:
    """
    Blocks in the order of their last uses: numbers of uses in a Fenwick tree, which counts them.

    Attributes:
        used: number of the last use of each block.
    """

    def __init__(self, uses: int) -> None:
        """Start empty, for so many uses."""
        self.used: dict[int, int] = {}
        self._tree = [0] * (uses + 1)
        self._now = 0

    def distance(self, block: int) -> int:
        """Return the blocks that were used since, this one included: it is in so large a cache."""
        before, found = self.used[block] - 1, len(self.used)
        while before:
            found -= self._tree[before]
            before -= before & -before
        return found

    def use(self, block: int) -> None:
        """Use a block."""
        if block in self.used:
            self._add(self.used[block], -1)
        self._now += 1
        self.used[block] = self._now
        self._add(self._now, 1)

    def _add(self, at: int, amount: int) -> None:
        while at < len(self._tree):
            self._tree[at] += amount
            at += at & -at


def needed_blocks(prompts: Sequence[Sequence[int]]) -> list[int]:
    """
    Return the capacities in blocks from which on a block of a prompt is a hit, for all that can be.

    The cache drops the block that was used longest ago, of a prompt the last one; a block is a
    hit if those before it in its prompt are hits, too.
    """
    stack = StackDistances(sum(map(len, prompts)))
    needed = []
    for blocks in prompts:
        most = 0
        for block in blocks:
            if block not in stack.used:
                break
            most = max(most, stack.distance(block))
            needed.append(most)
        for block in reversed(blocks):
            stack.use(block)
    return needed


def hit_rates(outcome: Outcome, arrivals: Arrivals, *, first_tokens: float) -> list[HitRate]:
    """
    Return the share of prompt tokens that a replica of each capacity finds.

    Args:
        outcome: of a run: when each prompt came, and to which replica.
        arrivals: its prompts, with contents or conversations.
        first_tokens: least capacity; each further one is twice as large, up to one with all hits.

    Ignores: that running requests take blocks, answers, and that of a prompt the last token is
    computed always.
    """
    blocks = prompt_blocks(arrivals)
    order = np.argsort(outcome.due_s, kind="stable")
    # Prompts that a decode replica computes have no prefill replica.
    computed_by = np.where(outcome.prefill_of >= 0, outcome.prefill_of, -1 - outcome.decode_of)
    needed: list[int] = []
    for replica in np.unique(computed_by):
        needed += needed_blocks([blocks[at] for at in order[computed_by[order] == replica]])
    distances, total = np.array(needed, dtype=np.int64), int(outcome.input_tokens.sum())
    rates: list[HitRate] = []
    tokens = max(CONTENT_TOKENS, int(first_tokens))
    for _ in range(CAPACITIES):
        hits = int(np.count_nonzero(distances <= tokens // CONTENT_TOKENS))
        rates.append(HitRate(tokens, hits * CONTENT_TOKENS / total))
        if hits == len(distances):
            break
        tokens *= 2
    return rates
