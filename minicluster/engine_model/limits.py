"""Settings of one replica's scheduler and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import not_negative, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """
    Settings of vLLM's scheduler.

    Attributes:
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: token budget of one step.
        kv_blocks: blocks of the KV cache that requests can use; vLLM's own count has one more,
            the null block.
        block_size: tokens of a block.
        long_prefill_token_threshold: most prompt tokens of one request in a step; 0: the budget.
        watermark_fraction: share of the blocks that an admission leaves free while others run;
            vLLM 0.29 has 0.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int
    long_prefill_token_threshold: int = 0
    watermark_fraction: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers as vLLM does."""
        positive(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_blocks=self.kv_blocks,
            block_size=self.block_size,
        )
        not_negative(
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark_fraction=self.watermark_fraction,
        )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs, {self.max_num_seqs}: every running sequence gets a token",
            )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free while others run; vLLM counts the null block."""
        return int(self.watermark_fraction * (self.kv_blocks + 1))

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the cache holds."""
        return self.kv_blocks * self.block_size
