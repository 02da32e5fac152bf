"""Engine profiles: what a version can deploy, how it schedules, and its fixed times."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import STRICT, fraction, not_negative, one_of, positive
from minicluster.specs.efficiency import EngineKernels
from minicluster.specs.gpu import NumberSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRules:
    """
    `[scheduling]` of an engine profile: how the engine fills a step.

    Versions are tuples of their release numbers.

    Attributes:
        mixed_steps: prompts are computed in the same step as decoded tokens, which come first;
            else waiting prompts get steps of their own, and decoding pauses.
        chunked_prefill: a prompt that does not fit the rest of the token budget is begun and
            continued in the next step; else it waits for a step with room, and a prompt of any
            size has a step alone.
        max_num_seqs: sequences in a step of the deployments whose measurements are predicted.
        kv_reserved_fraction: share of a request's output tokens whose KV cache has to be free
            before the request is admitted.
        fp8_kv: models whose KV cache is fp8 unless the row says otherwise. `small`: every model
            with weights of 8 bits or less. `requantised`: those of them that are published in
            wider weights (ModelOpt writes the scales of an fp8 cache with the weights'), but not
            where weights are scaled in blocks, because those checkpoints carry no such scales.
        async_scheduling_since: first version that by default prepares the next step while one
            runs.
        split_since: first version that serves prefill and decode apart; empty: every version. A
            row of split pools with a lower version names the version of the server around the
            engine (Dynamo), which says nothing of the engine's.
        recipe_spare_tokens: recipes made for one load set the token budget to batch + prompt +
            this many; `None`: they leave the default.
        recipe_users_exceed_slots: recipes for split pools send more users than decode has slots.
    """

    __pydantic_config__ = STRICT

    mixed_steps: bool
    chunked_prefill: bool
    max_num_seqs: int
    kv_reserved_fraction: float
    fp8_kv: str
    async_scheduling_since: tuple[int, ...]
    split_since: tuple[int, ...] = ()
    recipe_spare_tokens: int | None = None
    recipe_users_exceed_slots: bool = False

    def __post_init__(self) -> None:
        """Check the numbers and names."""
        positive(**{"scheduling.max_num_seqs": self.max_num_seqs})
        not_negative(
            **{
                "scheduling.kv_reserved_fraction": self.kv_reserved_fraction,
                "scheduling.recipe_spare_tokens": self.recipe_spare_tokens,
            }
        )
        one_of(("small", "requantised"), **{"scheduling.fp8_kv": self.fp8_kv})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """
    One engine version with one KV connector: the rules that a deployable plan keeps.

    Attributes:
        pp: pipeline degrees that can be deployed.
        block_size: KV block, tokens, on GPUs; `cpu_block_size` on CPUs.
        memory_fraction: share of GPU memory the engine takes.
        activation_bytes: working memory per GPU at `max_batched_tokens`; 0: as vLLM allocates it,
            by the model (docs/model.md, eq. M8).
        runtime_bytes: CUDA context and graphs per GPU; buffers of collectives are counted apart.
        max_batch_size: largest number of sequences in a step.
        max_batched_tokens: token budget of a step.
        per_layer_s: launch and host time per layer and step, not hidden.
        prompt_expert_layer_s: per layer with experts of a step that holds prompts: such steps are
            not captured whole, and experts take many kernels.
        captured_tokens: steps of at most this many tokens are captured all the same.
        per_exchange_s: time per collective and step beyond that of its kernel in a CUDA graph.
        per_step_s: scheduler and sampler per step.
        per_sequence_s: host time per sequence and step.
        per_request_s: API server, tokenisation and routing, once per request.
        transfer_base_s: fixed part of one KV pull.
        transfer_per_descriptor_s: per contiguous piece of KV cache in a pull: a block of a layer.
        scheduling: how the engine fills a step.
        deployable: whether a plan may be made for it; else it only predicts measured rows.
        window_per_query_head: whether decode attention with a window reads keys and values once per
            query head, as kernels do that know no shared heads.
        kernels: of this version, on every GPU, in place of those that the GPU lists.
    """

    __pydantic_config__ = STRICT

    name: str
    version: str
    connector: str
    pp: tuple[int, ...]
    block_size: int
    cpu_block_size: int
    memory_fraction: float
    activation_bytes: float
    runtime_bytes: float
    max_batch_size: int
    max_batched_tokens: int
    per_layer_s: float
    per_step_s: float
    per_sequence_s: float
    per_request_s: float
    transfer_base_s: float
    scheduling: SchedulingRules
    per_exchange_s: float = 0.0
    prompt_expert_layer_s: float = 0.0
    captured_tokens: int = 0
    transfer_per_descriptor_s: float = 0.0
    deployable: bool = True
    window_per_query_head: bool = False
    kernels: EngineKernels | None = None
    sources: tuple[NumberSource, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        fraction(memory_fraction=self.memory_fraction)
        positive(
            block_size=self.block_size,
            cpu_block_size=self.cpu_block_size,
            max_batch_size=self.max_batch_size,
            max_batched_tokens=self.max_batched_tokens,
        )
        not_negative(
            activation_bytes=self.activation_bytes,
            runtime_bytes=self.runtime_bytes,
            per_layer_s=self.per_layer_s,
            per_step_s=self.per_step_s,
            per_sequence_s=self.per_sequence_s,
            per_request_s=self.per_request_s,
            transfer_base_s=self.transfer_base_s,
            per_exchange_s=self.per_exchange_s,
            prompt_expert_layer_s=self.prompt_expert_layer_s,
            captured_tokens=self.captured_tokens,
            transfer_per_descriptor_s=self.transfer_per_descriptor_s,
        )
