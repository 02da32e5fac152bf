"""The requests of a run while it lasts, one list a column."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class RequestTable:
    """
    Requests by index; columns are lists, because the event loop reads single entries.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        max_tokens: tokens to generate.
        num_prefix_tokens: prompt tokens that every replica has in its prefix cache.
        num_output_tokens: tokens generated so far; those of the decode batch are added when the
            request is preempted.
        num_cached_tokens: prompt tokens that the prefill found cached.
        num_preemptions: times that the request lost its blocks.
        scheduled_s: begin of the first step of its prompt; infinite before.
        first_token_s: time of the first token; infinite before.
        last_token_s: time of the last token before a preemption; infinite without one.
        finished_s: time of the last token; infinite before.
        stall_s: longest gap between two tokens.
    """

    __slots__ = (
        "finished_s", "first_token_s", "last_token_s", "max_tokens", "num_cached_tokens",
        "num_output_tokens", "num_preemptions", "num_prefix_tokens", "num_prompt_tokens",
        "scheduled_s", "stall_s",
    )  # fmt: skip

    def __init__(
        self,
        num_prompt_tokens: Sequence[int],
        max_tokens: Sequence[int],
        num_prefix_tokens: Sequence[int] | None = None,
    ) -> None:
        """Start with every request still to arrive."""
        count = len(num_prompt_tokens)
        self.num_prompt_tokens = list(num_prompt_tokens)
        self.max_tokens = list(max_tokens)
        self.num_prefix_tokens = list(num_prefix_tokens or [0] * count)
        self.num_output_tokens = [0] * count
        self.num_cached_tokens = [0] * count
        self.num_preemptions = [0] * count
        self.scheduled_s = [inf] * count
        self.first_token_s = [inf] * count
        self.last_token_s = [inf] * count
        self.finished_s = [inf] * count
        self.stall_s = [0.0] * count

    def add(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Append a request that was not known at the start; return its index."""
        self.num_prompt_tokens.append(num_prompt_tokens)
        self.max_tokens.append(max_tokens)
        for zeros in (
            self.num_prefix_tokens, self.num_output_tokens, self.num_cached_tokens,
            self.num_preemptions,
        ):  # fmt: skip
            zeros.append(0)
        for times in (self.scheduled_s, self.first_token_s, self.last_token_s, self.finished_s):
            times.append(inf)
        self.stall_s.append(0.0)
        return len(self.max_tokens) - 1

    def __len__(self) -> int:
        """Count the requests."""
        return len(self.num_prompt_tokens)
