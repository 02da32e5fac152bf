"""What a replica remembers of prompts."""

from __future__ import annotations

from typing import Protocol


class PrefixCache(Protocol):
    """Prompt tokens whose keys and values are still there (docs/model.md, eq. Q4)."""

    def take(self, request: int, free_blocks: int) -> int:
        """Return how many first tokens of *request* are there while *free_blocks* are free."""

    def compute(self, request: int, tokens: int) -> None:
        """Note that the first *tokens* of *request* are in the step that begins, or before it."""

    def leave(self, request: int, tokens: int, free_blocks: int) -> None:
        """
        Keep what *request* leaves behind, as long as it fits into *free_blocks*.

        Of *tokens* computed; 0: it was preempted.
        """
