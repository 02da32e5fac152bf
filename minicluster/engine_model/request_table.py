"""What is known of each request while it runs, one list a column."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Ledger:
    """
    Requests by index; lists, because the event loop reads single entries.

    Attributes:
        prompt: prompt tokens.
        outputs: tokens to generate.
        prefix: prompt tokens that are in the prefix cache wherever the request goes.
        admitted_s: when the first step of its prompt began; infinite before.
        produced: tokens generated so far.
        first_s: when the first token was there; infinite before.
        last_s: when the last token before a preemption was there.
        finish_s: when the last token was there.
        stall_s: longest gap between two tokens.
        cached: prompt tokens that the prefill found cached.
        preemptions: times the request lost its blocks.
    """

    __slots__ = (
        "admitted_s",
        "cached",
        "finish_s",
        "first_s",
        "last_s",
        "outputs",
        "preemptions",
        "prefix",
        "produced",
        "prompt",
        "stall_s",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        outputs: Sequence[int],
        prefix: Sequence[int] | None = None,
    ) -> None:
        """Start with nothing done."""
        count = len(prompt)
        self.prompt = list(prompt)
        self.outputs = list(outputs)
        self.prefix = [0] * count if prefix is None else list(prefix)
        self.produced = [0] * count
        self.admitted_s = [inf] * count
        self.first_s = [inf] * count
        self.last_s = [inf] * count
        self.finish_s = [inf] * count
        self.stall_s = [0.0] * count
        self.cached = [0] * count
        self.preemptions = [0] * count

    def __len__(self) -> int:
        """Count the requests."""
        return len(self.prompt)
