"""Settings of one replica's scheduler and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.specs.checks import not_negative, positive

LOOKAHEAD_STEPS = 2
"""Steps' drafts that a sequence holds blocks for: vLLM allocates those that it verifies, and ahead
as many that are drafted next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """
    Settings of an engine's scheduler, by the names of vLLM, and the rules in which engines differ.

    The defaults of the rules are vLLM's where a step is scheduled when the last one has ended.

    Attributes:
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: token budget of one step.
        kv_blocks: blocks of the KV cache that requests can use; vLLM's own count has one more,
            the null block.
        block_size: tokens of a block.
        long_prefill_token_threshold: most prompt tokens of one request in a step; 0: the budget.
        mixed_steps, chunked_prefill, kv_reserved_fraction: see `SchedulingRules`.
        scheduled_ahead: the next step is scheduled while one runs: a request that arrives during a
            step joins the one after the next.
        receive_steps: decode steps from one look at new requests to the next; a step that holds
            prompts is followed by a look at once, as in SGLang's `scheduler_recv_skipper.py`.
        wait_steps: most steps that prompts wait for others while sequences decode.
        wait_fraction: share of the token budget that, once filled, ends the wait.
        speculative_tokens: drafts of each sequence that a decode step verifies.
        mean_accepted_tokens: of these, accepted on average.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int
    long_prefill_token_threshold: int = 0
    mixed_steps: bool = True
    chunked_prefill: bool = True
    kv_reserved_fraction: float = 0.0
    scheduled_ahead: bool = False
    receive_steps: int = 1
    wait_steps: int = 0
    wait_fraction: float = 0.0
    speculative_tokens: int = 0
    mean_accepted_tokens: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers as vLLM does."""
        positive(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_blocks=self.kv_blocks,
            block_size=self.block_size,
            receive_steps=self.receive_steps,
        )
        not_negative(
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            kv_reserved_fraction=self.kv_reserved_fraction,
            wait_steps=self.wait_steps,
            wait_fraction=self.wait_fraction,
            speculative_tokens=self.speculative_tokens,
            mean_accepted_tokens=self.mean_accepted_tokens,
        )
        if self.mean_accepted_tokens > self.speculative_tokens:
            raise InputError(
                "mean_accepted_tokens",
                self.mean_accepted_tokens,
                f"at most speculative_tokens = {self.speculative_tokens}",
            )
        needed = self.max_num_seqs * self.sequence_tokens
        if self.max_num_batched_tokens < needed:
            each = "" if self.sequence_tokens == 1 else f" times {self.sequence_tokens}"
            raise InputError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs{each}, {needed}: every running sequence gets a token",
            )

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a step that each sequence takes: the next one, and the drafts."""
        return 1 + self.speculative_tokens

    @property
    def lookahead_tokens(self) -> int:
        """Tokens beyond a sequence's own for which it holds blocks."""
        return LOOKAHEAD_STEPS * self.speculative_tokens

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
