"""Conversations whose keys and values are still in a replica's memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ConversationCache:
    """
    What finished requests left behind, least recently used first (docs/model.md, eq. Q4).

    Free blocks keep their contents until they are needed, so that the cache may be as large as
    what running requests leave.

    Ignores: single blocks. A conversation is kept or dropped whole, while vLLM drops its last
    blocks first; one that two requests share at a time is found by one of them.
    """

    __slots__ = ("_block_size", "_blocks", "_kept", "_session")

    def __init__(self, session: Sequence[int], block_size: int) -> None:
        """Start empty; *session* is each request's conversation, -1: none."""
        self._session = session
        self._block_size = block_size
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._blocks = 0

    def take(self, request: int, free_blocks: int) -> int:
        """See `PrefixCache`; the conversation is the request's alone from now on."""
        session = self._session[request]
        if session < 0:
            return 0
        self._drop(free_blocks)
        tokens = self._kept.pop(session, 0)
        self._blocks -= tokens // self._block_size
        return tokens

    def compute(self, request: int, tokens: int) -> None:
        """See `PrefixCache`; nobody else can find these."""

    def leave(self, request: int, tokens: int, free_blocks: int) -> None:
        """See `PrefixCache`."""
        session = self._session[request]
        if session < 0 or not tokens:
            return
        self._blocks -= self._kept.pop(session, 0) // self._block_size
        self._kept[session] = tokens
        self._blocks += tokens // self._block_size
        self._drop(free_blocks)

    def _drop(self, free_blocks: int) -> None:
        """Drop the oldest until the rest fits into what is free."""
        while self._kept and self._blocks > free_blocks:
            _, tokens = self._kept.popitem(last=False)
            self._blocks -= tokens // self._block_size
