"""Blocks of prompts, known by what is in them, that are still in a replica's memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from minicluster.workload.arrivals import CONTENT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence


class ContentCache:
    """
    Blocks of one replica by their ids (docs/model.md, eq. Q4).

    A block is found from the step on that computes it, by any number of requests. One that no
    request uses stays until its memory is needed: the one that was used longest ago goes first,
    of a prompt its last.

    Ignores: that requests which share a block share its memory (each has its own here), and that
    the first tokens of a block may be there while the rest is not.
    """

    __slots__ = ("_blocks_each", "_content", "_idle", "_tokens_each", "_used_by", "_users")

    def __init__(
        self,
        content: Sequence[tuple[int, ...]],
        block_size: int,
        *,
        tokens_each: int = CONTENT_TOKENS,
    ) -> None:
        """Start empty; *content*: ids of each prompt's whole blocks of *tokens_each*, in order."""
        self._content = content
        self._tokens_each = tokens_each
        self._blocks_each = -(-tokens_each // block_size)
        self._users: Counter[int] = Counter()
        self._used_by: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def take(self, request: int, free_blocks: int) -> int:
        """See `PrefixCache`; the longest run of its first blocks that are all there."""
        self._drop(free_blocks)
        found = 0
        for block in self._content[request]:
            if block not in self._users and block not in self._idle:
                break
            found += 1
        return found * self._tokens_each

    def compute(self, request: int, tokens: int) -> None:
        """See `PrefixCache`; whole blocks count."""
        ids = self._content[request]
        before = self._used_by.get(request, 0)
        now = min(len(ids), tokens // self._tokens_each)
        for block in ids[before:now]:
            self._users[block] += 1
            self._idle.pop(block, None)
        self._used_by[request] = max(before, now)

    def leave(self, request: int, tokens: int, free_blocks: int) -> None:
        """See `PrefixCache`; a prompt that was pulled leaves its blocks as well."""
        self.compute(request, tokens)
        for block in reversed(self._content[request][: self._used_by.pop(request)]):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None
        self._drop(free_blocks)

    def _drop(self, free_blocks: int) -> None:
        """Drop the oldest until the rest fits into what is free."""
        while self._idle and len(self._idle) * self._blocks_each > free_blocks:
            self._idle.popitem(last=False)
