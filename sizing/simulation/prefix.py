"""Conversations whose keys and values are still in a replica's memory."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """
    What finished requests left behind, least recently used first (docs/model.md, eq. Q4).

    Free blocks keep their contents until they are needed, so that the cache may be as large as
    what running requests leave.

    Ignores: single blocks. A conversation is kept or dropped whole, while vLLM drops its last
    blocks first; one that two requests share at a time is found by one of them.
    """

    __slots__ = ("_block_size", "_blocks", "_kept")

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self._block_size = block_size
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._blocks = 0

    def take(self, session: int, free_blocks: int) -> int:
        """Return how many tokens of *session* are there; the request owns them from now on."""
        self._drop(free_blocks)
        tokens = self._kept.pop(session, 0)
        self._blocks -= tokens // self._block_size
        return tokens

    def put(self, session: int, tokens: int, free_blocks: int) -> None:
        """Keep *tokens* of *session*, the most recent of all."""
        self._blocks -= self._kept.pop(session, 0) // self._block_size
        self._kept[session] = tokens
        self._blocks += tokens // self._block_size
        self._drop(free_blocks)

    def _drop(self, free_blocks: int) -> None:
        """Drop the oldest until the rest fits into what is free."""
        while self._kept and self._blocks > free_blocks:
            _, tokens = self._kept.popitem(last=False)
            self._blocks -= tokens // self._block_size
