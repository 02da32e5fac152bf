"""Options of a training run, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import Count, Positive, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions(Spec):
    """
    The keys of a training scenario; each is also an option of `sizing train`.

    Attributes:
        model: model of the catalog; or give its shape.
        head_dim: size of an attention head [default: hidden / heads].
        ffn: width of the feed-forward layer.
        seq: tokens per sequence.
        batch: sequences per step, all replicas together.
        gpu: GPU of the catalog.
        cluster: cluster preset, with its topology [default: nodes of the GPU's first preset].
        gpus: number of GPUs [default: tp x pp x cp x dp].
        tp: tensor-parallel degree.
        pp: pipeline stages.
        cp: context-parallel degree.
        dp: data-parallel replicas [default: what the GPUs leave].
        ep: expert-parallel degree.
        micro_batch: sequences per micro-batch [default: chosen].
        interleave: chunks of layers per pipeline stage [default: chosen].
        recompute: activation recomputation: none, selective or full.
        dtype: number format: bf16, fp16 or fp8.
        family: block type: gpt or llama [default: gpt where ffn = 4 hidden].
        attention: attention: flash or materialised [default: flash; in gpt on GPUs older than it,
            without fp8, materialised].
        sequence_parallel: norms are sliced over tp, too [default: with tp; in gpt on such GPUs
            with selective recompute only].
        zero: ZeRO stage, 0 to 3 [default: 0 in gpt; in llama 3, or 2 with pipeline stages].
        overlap_experts: expert exchange overlapped with another micro-batch.
        tokens: tokens of the whole run.
        gpu_mtbf_s: mean time between failures of one GPU in seconds [default: the cluster's].
        checkpoint_s: seconds per checkpoint [default: no failures are estimated].
        restart_s: seconds to restart after a failure.
    """

    model: str | None = None
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: Count | None = None
    vocab: Count | None = None
    seq: Count
    batch: Count
    gpu: str | None = None
    cluster: str | None = None
    gpus: Count | None = None
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    dp: Count | None = None
    ep: Count = 1
    micro_batch: Count | None = None
    interleave: Count | None = None
    recompute: str = "none"
    dtype: str = "bf16"
    family: str | None = None
    attention: str | None = None
    sequence_parallel: bool | None = None
    zero: int | None = None
    overlap_experts: bool | None = None
    tokens: Positive | None = None
    gpu_mtbf_s: float | None = None
    checkpoint_s: float | None = None
    restart_s: float = 0.0
