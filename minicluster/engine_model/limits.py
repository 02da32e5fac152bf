"""Settings of one replica's scheduler and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import not_negative, positive
from minicluster.specs.engine import EngineOptions, EngineRules

LOOKAHEAD_STEPS = 2
"""Steps' drafts that a sequence holds blocks for: vLLM allocates those that it verifies, and ahead
as many that are drafted next."""

NO_OPTIONS, VLLM_RULES = EngineOptions(), EngineRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """
    Settings of an engine's scheduler, by the names of vLLM.

    Attributes:
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: token budget of one step.
        kv_blocks: blocks of the KV cache that requests can use; vLLM's own count has one more,
            the null block.
        block_size: tokens of a block.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int
    options: EngineOptions = NO_OPTIONS
    rules: EngineRules = VLLM_RULES

    def __post_init__(self) -> None:
        """Check the numbers as vLLM does."""
        positive(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_blocks=self.kv_blocks,
            block_size=self.block_size,
        )
        needed = self.max_num_seqs * self.sequence_tokens
        if self.max_num_batched_tokens < needed:
            times = "" if self.sequence_tokens == 1 else f" times {self.sequence_tokens}"
            raise InputError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs{times}, {needed}: every running sequence gets a token",
            )

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a step that each sequence takes: the next one, and the drafts."""
        return 1 + self.options.speculative_tokens

    @property
    def lookahead_tokens(self) -> int:
        """Tokens beyond a sequence's own for which it holds blocks."""
        return LOOKAHEAD_STEPS * self.options.speculative_tokens

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the cache holds."""
        return self.kv_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadLimits:
    """
    Capacity in tokens of both tiers of a replica, and seconds that a token takes to come back.

    Attributes:
        host_tokens, disk_tokens: capacity.
        host_token_s: from host memory to the GPUs.
        disk_token_s: from disk to host memory.
    """

    host_tokens: int
    host_token_s: float
    disk_tokens: int
    disk_token_s: float

    def __post_init__(self) -> None:
        """Check signs."""
        positive(host_token_s=self.host_token_s)
        not_negative(
            host_tokens=self.host_tokens,
            disk_tokens=self.disk_tokens,
            disk_token_s=self.disk_token_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    """
    Slots for adapters of a replica, and seconds in which one is copied to a slot.

    Attributes:
        slots: vLLM's `max_loras`.
    """

    slots: int
    load_s: float

    def __post_init__(self) -> None:
        """Check signs."""
        positive(slots=self.slots)
        not_negative(load_s=self.load_s)
