"""What an engine version can deploy, and what it costs per layer, step and request."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import STRICT, fraction, not_negative, positive
from minicluster.specs.efficiency import EngineKernels
from minicluster.specs.gpu import NumberSource


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
