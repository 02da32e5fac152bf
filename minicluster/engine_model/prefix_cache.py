"""Prefix caches: prompt tokens whose keys and values are still in a replica's memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Protocol

from minicluster.workload.arrivals import CONTENT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixCache(Protocol):
    """The prefix cache of one replica (docs/model.md, eq. Q4)."""

    def find(self, request: int, free_blocks: int) -> int:
        """Return how many first tokens of *request* are cached while *free_blocks* are free."""

    def cache(self, request: int, tokens: int) -> None:
        """Note that the first *tokens* of *request* are in the step that begins, or before it."""

    def free(self, request: int, tokens: int, free_blocks: int) -> None:
        """
        Keep the blocks that *request* gives back, as long as they fit into *free_blocks*.

        Args:
            request: finished or preempted.
            tokens: computed of it; 0: it was preempted.
            free_blocks: blocks that no running request holds.
        """


class ConversationCache:
    """
    Conversations that finished requests left behind (docs/model.md, eq. Q4).

    The least recently used one is dropped first.
    Free blocks keep their contents until they are needed, so that the cache may be as large as
    what running requests leave.

    Ignores: single blocks. A conversation is kept or dropped whole, while vLLM drops its last
    blocks first; a conversation of two requests at a time is found by one of them.
    """

    __slots__ = ("_block_size", "_blocks", "_kept", "_session")

    def __init__(self, session: Sequence[int], block_size: int) -> None:
        """Start empty; *session* is the conversation of each request, -1: none."""
        self._session = session
        self._block_size = block_size
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._blocks = 0

    def find(self, request: int, free_blocks: int) -> int:
        """See `PrefixCache`; from now on the conversation belongs to this request alone."""
        session = self._session[request]
        if session < 0:
            return 0
        self._evict(free_blocks)
        tokens = self._kept.pop(session, 0)
        self._blocks -= tokens // self._block_size
        return tokens

    def cache(self, request: int, tokens: int) -> None:
        """See `PrefixCache`; no other request can find these tokens."""

    def free(self, request: int, tokens: int, free_blocks: int) -> None:
        """See `PrefixCache`."""
        session = self._session[request]
        if session < 0 or not tokens:
            return
        self._blocks -= self._kept.pop(session, 0) // self._block_size
        self._kept[session] = tokens
        self._blocks += tokens // self._block_size
        self._evict(free_blocks)

    def _evict(self, free_blocks: int) -> None:
        while self._kept and self._blocks > free_blocks:
            _, tokens = self._kept.popitem(last=False)
            self._blocks -= tokens // self._block_size


class ContentCache:
    """
    Blocks of one replica by the ids of their contents (docs/model.md, eq. Q4).

    A block is found from the step on that computes it, by any number of requests. A block that no
    request uses stays until its memory is needed: the least recently used goes first, of one
    prompt the last.

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

    def find(self, request: int, free_blocks: int) -> int:
        """See `PrefixCache`; the longest run of the prompt's first blocks that are all cached."""
        self._evict(free_blocks)
        found = 0
        for block in self._content[request]:
            if block not in self._users and block not in self._idle:
                break
            found += 1
        return found * self._tokens_each

    def cache(self, request: int, tokens: int) -> None:
        """See `PrefixCache`; whole blocks count."""
        ids = self._content[request]
        before = self._used_by.get(request, 0)
        now = min(len(ids), tokens // self._tokens_each)
        for block in ids[before:now]:
            self._users[block] += 1
            self._idle.pop(block, None)
        self._used_by[request] = max(before, now)

    def free(self, request: int, tokens: int, free_blocks: int) -> None:
        """See `PrefixCache`; a prompt that was pulled leaves its blocks as well."""
        self.cache(request, tokens)
        for block in reversed(self._content[request][: self._used_by.pop(request)]):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None
        self._evict(free_blocks)

    def _evict(self, free_blocks: int) -> None:
        while self._idle and len(self._idle) * self._blocks_each > free_blocks:
            self._idle.popitem(last=False)
