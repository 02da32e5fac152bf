"""Work of one engine step on one GPU: FLOPs and bytes, op by op, no seconds yet."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.lora import lora_modules, popularity
from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.attention import attention_ops
from sizing.latency.op import ACTIVATION_BYTES, Op, Work, gemm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from minicluster.specs.lora import LoraSpec
    from minicluster.specs.model import ModelSpec, MoeSpec
    from minicluster.specs.slicing import Slicing
    from sizing.latency.op import StepLoad


POPULARITY_EXPONENT = 1.01
POPULARITY_RATIO = 200.0
"""
Loads of experts: density x^-1.01 from the least popular to one 200 times as popular.

Source: the sampler with which aiconfigurator times MoE kernels (collector, power_law_logits_v3:
exponent 1.01 for DeepSeek, 0.01 to 2 for small batches), read 2026-11-20.
"""


TOUCH_RATIO = 12.0
"""
The same for how many experts a step reads, small batches being rounded to whole tokens.

Source: of 3 to 200 the ratio with which GEMMs over experts that are touched (eq. R2) explain best
how much faster 8 to 256 tokens of that sampler are than tokens spread evenly: op tables of bf16,
fp8, int4 and fp4 experts on H100 and H200, aiconfigurator-core 0.12.0, median 2 % and 11 % (rms)
off; 200 would be 17 % and 24 % off, even popularity 10 % and 14 %.
"""
CLASSES = 16
"""Popularity in so many equal shares of the experts."""


def experts_touched(
    num_experts: float, per_token: NDArray[np.float64] | float, tokens: NDArray[np.float64]
) -> NDArray[np.float64]:
    """
    Experts that a step reads, if tokens are routed independently and some experts are popular.

        E' = E mean_i (1 - (1 - k / E)^(x_i m)), at least k      (docs/model.md, eq. W5)

    Source:
        Occupancy: an expert stays untouched by m tokens with probability (1 - k / E)^m; x_i is
        its load over the mean one, a power law over a range of 12 (`TOUCH_RATIO`).

    Ignores:
        That tokens of one request prefer the same experts; how skewed the traffic at hand is.
    """
    share, m = np.asarray(per_token / num_experts)[..., None], np.asarray(tokens)[..., None]
    spread = 1 - (1 - np.minimum(1.0, share)) ** (_popularity() * m)
    one = per_token * np.minimum(1.0, tokens)
    return np.asarray(np.maximum(num_experts * spread.mean(axis=-1), one))


@cache
def _popularity() -> NDArray[np.float64]:
    """Loads over their mean, of the middle of each class, by the law above."""
    power = 1 - POPULARITY_EXPONENT
    middle = (np.arange(CLASSES) + 0.5) / CLASSES
    loads = ((TOUCH_RATIO**power - 1) * middle + 1) ** (1 / power)
    return np.asarray(loads / loads.mean())


@cache
def popularity_cumulants(exponent: float, ratio: float) -> tuple[float, float, float]:
    """
    Second, third and fourth cumulant of an expert's load over the mean one.

        v = q2 - 1,  c3 = q3 - 3 q2 + 2,  c4 = q4 - 4 q3 - 3 q2^2 + 12 q2 - 6,
        qj = E[x^j] / E[x]^j,  E[x^j] = int x^(j - b) / int x^-b over [1, R]
        (docs/model.md, eq. W11)

    Args:
        exponent: b of the density x^-b; none of 1 to 5.
        ratio: R, the most popular expert's load over the least popular's.

    Source:
        Moments of a bounded power law.

    Ignores:
        That few experts are a small sample of it.
    """
    if ratio <= 1:
        return 0.0, 0.0, 0.0

    def moment(j: int) -> float:
        power = j + 1 - exponent
        return (float(ratio**power) - 1) / power

    q2, q3, q4 = (moment(j) * moment(0) ** (j - 1) / moment(1) ** j for j in (2, 3, 4))
    return q2 - 1, q3 - 3 * q2 + 2, q4 - 4 * q3 - 3 * q2**2 + 12 * q2 - 6


@cache
def packed_share(num_experts: int, redundant: int, groups: int) -> float:
    """
    Load of the busiest of *groups* groups of balanced experts over the average one's, on average.

    Each further copy goes to the expert whose copies have the most load; then each copy, the
    heaviest first, to the group with the least load that has room (docs/model.md, eq. W11).

    Args:
        num_experts: E, with the loads of the power law's quantiles.
        redundant: copies beyond one of each; with E a multiple of *groups*.

    Source:
        deepseek-ai/EPLB, the algorithm of vLLM 0.29.0 distributed/eplb/policy/default.py.

    Ignores:
        Traffic that changes until experts are moved again.
    """
    power, middle = 1 - POPULARITY_EXPONENT, (np.arange(num_experts) + 0.5) / num_experts
    loads = ((POPULARITY_RATIO**power - 1) * middle + 1) ** (1 / power)
    copies = np.ones(num_experts)
    for _ in range(redundant):
        copies[np.argmax(loads / copies)] += 1
    each = np.repeat(loads / copies, copies.astype(int))
    packed, room = np.zeros(groups), np.full(groups, len(each) // groups)
    for load in np.sort(each)[::-1]:
        at = int(np.argmin(np.where(room, packed, np.inf)))
        packed[at] += load
        room[at] -= 1
    return float(packed.max() / packed.mean())


def busiest_share(moe: MoeSpec, tokens: NDArray[np.float64], *, groups: int) -> NDArray[np.float64]:
    """
    Mean rows of the busiest of *groups* groups of experts over those of the average group.

        b = 1 + w sqrt(K2),  w = z + (z^2 - 1) a/6 + (z^3 - 3 z) e/24 - (2 z^3 - 5 z) a^2/36,
        a = K3 / K2^1.5,  e = K4 / K2^2,  at most g min(1, E / (g k))   (docs/model.md, eq. W11)

    K are cumulants of a group's rows over their mean r = m k / g: with s = g / E and those of one
    expert's load, K2 = s v + 1/r, K3 = s^2 c3 + 3 s v/r + 1/r^2 and
    K4 = s^3 c4 + 6 s^2 c3/r + 7 s v/r^2 + 1/r^3. Of balanced experts v = c3 = c4 = 0, and b is
    `packed_share` times that.

    Args:
        moe: E experts, k of which a token visits, dealt out evenly; without a balancer regardless
            of their loads.
        tokens: m of the whole stage, any shape.
        groups: g, the expert-parallel degree.

    Source:
        Poisson rows at the load of E / g experts; z is the mean largest of g normal deviates, w
        that of rows so skewed (Cornish and Fisher 1938). Within 2.5 % of a Monte Carlo for 2 to 72
        groups of 256 or more experts.

    Ignores:
        The skew of real traffic, which is taken as aiconfigurator's; that b differs between layers
        (p99 1.4 times the mean at EP 32): over 58 layers, whose sum a step takes, 4 % are left.
    """
    if groups == 1:
        return np.ones_like(tokens)
    num_experts, per_token, packed = moe.num_experts, moe.experts_per_token, 1.0
    v, c3, c4 = popularity_cumulants(POPULARITY_EXPONENT, POPULARITY_RATIO)
    if moe.redundant_experts is not None:
        v = c3 = c4 = 0.0
        packed = packed_share(num_experts, moe.redundant_experts, groups)
    s, drawn = groups / num_experts, groups / np.maximum(tokens * per_token, 1e-9)
    variance = s * v + drawn
    third = s**2 * c3 + 3 * s * v * drawn + drawn**2
    fourth = s**3 * c4 + 6 * s**2 * c3 * drawn + 7 * s * v * drawn**2 + drawn**3
    skewness, excess = third / variance**1.5, fourth / variance**2
    z = NormalDist().inv_cdf((groups - 0.375) / (groups + 0.25))
    largest = z + (z**2 - 1) * skewness / 6 + (z**3 - 3 * z) * excess / 24
    largest -= (2 * z**3 - 5 * z) * skewness**2 / 36
    most = groups * min(1.0, num_experts / (groups * per_token))
    share = packed * (1 + largest * np.sqrt(variance))
    return np.asarray(np.clip(share, 1, max(1.0, most)))


def feedforward_ops(model: ModelSpec, load: StepLoad, *, slicing: Slicing) -> tuple[Op, ...]:
    """
    Feed-forward of all layers: dense (eq. W4), MoE (eq. W4 and W5, docs/model.md).

    Gated: gate and up are one GEMM of 2 f columns, then down; plain: up and down.
    """
    moe, dense_layers = model.moe, model.num_dense_layers
    ops = list(
        _dense_ops("mlp", model, load, width=model.ffn_size / slicing.tp, repeats=dense_layers)
    )
    if moe:
        layers = model.num_expert_layers
        sizes = (load.tokens, model.hidden_size, moe.num_experts)
        ops.append(gemm("moe router", "W5", *sizes, dtype=model.dtype, repeats=layers))
        if moe.latent_size:
            m, h = load.tokens, model.hidden_size
            for name, inner, columns in (
                ("experts' input", h, moe.latent_size), ("experts' output", moe.latent_size, h),
            ):  # fmt: skip
                ops.append(gemm(name, "W5", m, inner, columns, dtype=model.dtype, repeats=layers))
        ops += _expert_ops(model, moe, load, slicing=slicing, layers=layers)
        ops += _dense_ops(
            "shared", model, load, width=moe.shared_ffn_size / slicing.tp, repeats=layers
        )
    return tuple(ops)


def _dense_ops(
    name: str, model: ModelSpec, load: StepLoad, *, width: float, repeats: int
) -> tuple[Op, ...]:
    """Two GEMMs with *width* values between them, on one GPU; none if there is no width."""
    if not width or not repeats:
        return ()
    m, h = load.tokens, model.hidden_size
    dtype = model.shared_dtype if name == "shared" else model.dense_dtype
    up = (2 if model.gated_mlp else 1) * width
    return (
        gemm(f"{name} up", "W4", m, h, up, dtype=dtype, repeats=repeats),
        gemm(f"{name} down", "W4", m, width, h, dtype=dtype, repeats=repeats),
    )


def _expert_ops(
    model: ModelSpec, moe: MoeSpec, load: StepLoad, *, slicing: Slicing, layers: int
) -> tuple[Op, ...]:
    """
    Grouped GEMMs over the experts that are touched on the busiest GPU (eq. W5 and W11).

    The tokens of all copies of attention meet the experts of the stage: E / ep of them on this
    GPU, each sliced.
    """
    tokens = load.tokens * slicing.dp
    k = moe.experts_per_token
    busiest = busiest_share(moe, tokens, groups=slicing.ep)
    rows = tokens * k / slicing.ep * busiest
    held = (moe.num_copies if slicing.ep > 1 else moe.num_experts) / slicing.ep
    touched = experts_touched(held, k / slicing.ep * busiest, tokens)
    h, f, dtype = model.expert_width, moe.expert_ffn_size / slicing.moe_tp, model.weight_dtype
    ops = []
    for name, inner, columns in (
        ("experts up", h, (2 if model.gated_mlp else 1) * f),
        ("experts down", f, h),
    ):
        weights = touched * inner * columns * DTYPE_BYTES[dtype]
        activations = rows * (inner + columns) * ACTIVATION_BYTES
        work = Work(2 * rows * inner * columns, weights + activations)
        ops.append(
            Op(name, "W5", "grouped gemm", dtype, layers, work, rows=rows, columns=columns,
               inner=inner, groups=touched)
        )  # fmt: skip
    return tuple(ops)


BUFFER_BYTES = DTYPE_BYTES["fp32"]
"""Bytes of a value between the two kernels (vLLM 0.29.0, lora/punica_wrapper/punica_gpu.py)."""


def distinct_adapters(lora: LoraSpec, requests: NDArray[np.float64]) -> NDArray[np.float64]:
    """
    Return the distinct adapters of a batch of independent requests, on average.

        g = min(max_loras, sum_i 1 - (1 - p_i)^B)      (docs/model.md, eq. W12)
    """
    shares = np.array(popularity(lora.adapters, lora.popularity_exponent))
    met = 1 - (1 - shares) ** np.asarray(requests, dtype=np.float64)[..., None]
    return np.asarray(np.minimum(float(lora.max_loras), met.sum(axis=-1)))


def lora_ops(lora: LoraSpec | None, model: ModelSpec, load: StepLoad, *, tp: int) -> tuple[Op, ...]:
    """
    Multiply each token by A and B of its request's adapter, beside every layer that has slots.

        shrink: F = 2 m r c k,  Q = g r c k a + m (k a + c r 4),
        expand: F = 2 m r n,  Q = g r n a + m (c r 4 + 2 n a),
        one launch of each a layer and module      (docs/model.md, eq. W12)

    Returns:
        No ops without adapters. A kernel takes what R4 says of one that mostly moves bytes.

    Source:
        vLLM 0.29.0, lora/ops/triton_ops/lora_shrink_op.py and lora_expand_op.py: weights of the
        batch's adapters, at the rank of the slots; k inputs, n outputs, c projections as one.

    Ignores:
        Tokens of an adapter that fill no tile, clearing the buffer, and sorting tokens by adapter.
    """
    if lora is None:
        return ()
    m, rank, a = load.tokens, lora.max_lora_rank, ACTIVATION_BYTES
    there = distinct_adapters(lora, load.prompts + load.sequences) * DTYPE_BYTES[model.dtype]
    ops = []
    for each in lora_modules(lora, model, tp=tp):
        inner, made = each.parts * each.inner, each.columns
        buffer = each.parts * rank * BUFFER_BYTES
        works = {
            "shrink": Work(
                2 * m * rank * inner, there * rank * inner + m * (each.inner * a + buffer)
            ),
            "expand": Work(2 * m * rank * made, there * rank * made + m * (buffer + 2 * made * a)),
        }
        ops += [
            Op(f"LoRA {each.name} {name}", "W12", "elementwise", "bf16", model.num_layers, work)
            for name, work in works.items()
        ]
    return tuple(ops)


def step_ops(model: ModelSpec, load: StepLoad, *, slicing: Slicing) -> tuple[Op, ...]:
    """
    List the ops that a step meets on its way through the model, collectives left out.

    The way leads through every pipeline stage and over one GPU of each: ops are repeated once
    per layer of the whole model, whatever `slicing.pp` is.

    Args:
        load: what one data-parallel copy of attention holds; arrays of any shape. The experts
            see the tokens of all copies, each taken to hold as much.

    Returns:
        Ops whose work has the shape of *load*; an op is repeated once a layer or once a step.
    """
    logits = model.vocab_size / slicing.tp
    return (
        *attention_ops(model, load, tp=slicing.tp),
        *feedforward_ops(model, load, slicing=slicing),
        *_elementwise_ops(model, load, slicing=slicing),
        # Logits of the last token of each prompt and of each sequence decoded (eq. W7).
        gemm("lm_head", "W7", load.logits, model.hidden_size, logits, dtype=model.dtype, repeats=1),
    )


def _elementwise_ops(model: ModelSpec, load: StepLoad, *, slicing: Slicing) -> tuple[Op, ...]:
    """
    Norms, rotary embedding and activation: bytes only (docs/model.md, eq. W6).

    A fused norm reads and writes the hidden state and the residual. Rotary, and a norm of queries
    and keys, reads and writes them. The activation reads what `mlp up` wrote and writes half of it
    if gated.
    """
    m, tp, moe = load.tokens, slicing.tp, model.moe
    passes = 3.0 if model.gated_mlp else 2.0
    norms = model.num_mixed_layers + (0 if model.parallel_attention else model.num_ffn_layers)
    per_token = [  # norms of queries and of keys are two kernels
        ("norm", norms, 4.0 * model.hidden_size),
        *_head_passes(model, tp=tp),
        ("activation", model.num_dense_layers, passes * model.ffn_size / tp),
    ]
    if moe:
        # Tokens of dp copies meet k experts each, spread over the tp x dp GPUs of the stage.
        width = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
        per_token.append(("expert activation", model.num_expert_layers, passes * width / tp))
    works = (Work(0 * m, m * values * ACTIVATION_BYTES) for *_, values in per_token)
    return tuple(
        Op(name, "W6", "elementwise", model.dtype, repeats, work)
        for (name, repeats, values), work in zip(per_token, works, strict=True)
        if repeats and values
    )


def _head_passes(model: ModelSpec, *, tp: int) -> Iterator[tuple[str, int, float]]:
    """Yield what reads and writes queries and keys: name, repeats, values of a token."""
    for kind, (layers, of) in zip(("", "window "), model.kinds_of_heads, strict=False):
        values = (of.num_heads / tp + max(1.0, of.num_kv_heads / tp)) * of.head_dim
        yield f"{kind}query norm", 2 * layers if model.query_norm else 0, values
        yield f"{kind}rotary", 0 if model.position_rows else layers, 2.0 * values
