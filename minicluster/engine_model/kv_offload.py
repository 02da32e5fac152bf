"""KV blocks of one replica in host memory and on disk."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.engine_model.limits import OffloadLimits

MOST_BLOCKS = 1 << 20
"""Blocks of a conversation that are told apart."""


class HostCache:
    """
    The offloaded blocks of one replica (docs/model.md, eq. Q14).

    A block is copied to both tiers when it is computed, and each tier drops the block that was
    used longest ago, of a prompt the last one. A block read from disk is in host memory again. One
    load at a time takes the disk, and one the link to the GPUs, in the order of their begins.

    Ignores: that copies to both tiers take time, and that one load serves several requests.

    Attributes:
        host_tokens, disk_tokens: per request, prompt tokens that came from each tier.
    """

    def __init__(
        self,
        limits: OffloadLimits,
        *,
        content: Sequence[tuple[int, ...]] | None,
        session: Sequence[int] | None,
        tokens_each: int,
        found: tuple[list[int], list[int]],
    ) -> None:
        """
        Start empty.

        Args:
            limits: capacities and rates.
            content: ids of each prompt's whole blocks, in order; `None`: the blocks are those of
                conversations.
            session: conversation of each request, -1: none.
            tokens_each: tokens of a block.
            found: what to write `host_tokens` and `disk_tokens` to.
        """
        self._content, self._session, self._each = content, session, tokens_each
        self._limits = limits
        self._host: OrderedDict[int, None] = OrderedDict()
        self._disk: OrderedDict[int, None] = OrderedDict()
        self._disk_free_s = self._link_free_s = 0.0
        self.host_tokens, self.disk_tokens = found

    def _blocks(self, request: int, tokens: int) -> Sequence[int]:
        if self._content is not None:
            return self._content[request][: tokens // self._each]
        if self._session is None or self._session[request] < 0:
            return ()
        first = self._session[request] * MOST_BLOCKS
        return range(first, first + min(tokens // self._each, MOST_BLOCKS))

    def store(self, request: int, tokens: int) -> None:
        """Copy the blocks of the first tokens of a request, which are computed, to both tiers."""
        blocks = self._blocks(request, tokens)
        self._put(self._host, blocks, self._limits.host_tokens)
        self._put(self._disk, blocks, self._limits.disk_tokens)

    def _put(self, tier: OrderedDict[int, None], blocks: Sequence[int], tokens: int) -> None:
        """Note blocks as used, the first one last: of a prompt the last ones are dropped first."""
        for block in reversed(blocks):
            tier[block] = None
            tier.move_to_end(block)
        while len(tier) * self._each > tokens:
            tier.popitem(last=False)

    def load(
        self, request: int, cached: int, num_tokens: int, most: int, now_s: float
    ) -> tuple[int, float]:
        """
        Begin to load what the GPUs lack of a prompt.

        Args:
            request: of which the first *num_tokens* are to be computed.
            cached: first tokens that the GPUs have.
            num_tokens: prompt, and tokens generated before a preemption.
            most: tokens that may be found altogether.
            now_s: time.

        Returns:
            First tokens that the GPUs have after the load, and its end; *cached* where there is
            nothing to load.
        """
        blocks, each = self._blocks(request, num_tokens), self._each
        at = cached // each
        from_disk = 0
        while at < len(blocks):
            if blocks[at] not in self._host:
                if blocks[at] not in self._disk:
                    break
                from_disk += 1
            at += 1
        new = min(at * each, most) - cached
        if new <= 0:
            return cached, now_s
        self.store(request, at * each)
        disk = min(from_disk * each, new)
        self.host_tokens[request], self.disk_tokens[request] = new - disk, disk
        return cached + new, self._end_s(new, disk, now_s)

    def _end_s(self, tokens: int, disk_tokens: int, now_s: float) -> float:
        """Return the end of a load: first the disk's part, then all of it over the link."""
        if disk_tokens:
            begin_s = max(now_s, self._disk_free_s)
            now_s = self._disk_free_s = begin_s + disk_tokens * self._limits.disk_token_s
        self._link_free_s = max(now_s, self._link_free_s) + tokens * self._limits.host_token_s
        return self._link_free_s
