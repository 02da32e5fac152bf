"""Bytes that one engine step sends between the GPUs of a replica; no seconds yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.specs.gpu import AllToAllLibrary
from minicluster.specs.model import DTYPE_BYTES
from sizing.latency.op import ACTIVATION_BYTES

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec
    from minicluster.specs.slicing import Slicing
    from sizing.latency.op import StepLoad


PATTERNS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "point-to-point")


@dataclass(frozen=True, slots=True)
class Exchange:
    """
    One collective, run `repeats` times a step.

    Attributes:
        equation: of its bytes, in docs/model.md.
        pattern: one of `PATTERNS`; decides how it is timed.
        group: GPUs that take part.
        size_bytes: S of one run. all-reduce: the buffer, the same on every GPU. all-gather and
            reduce-scatter: the whole, of all GPUs together. all-to-all: what one GPU sends to all
            others together. point-to-point: what one GPU sends.
        stride: distance between neighbours of the group in GPU order: 1 for tensor parallel,
            tp for data-parallel ranks, tp x dp for pipeline stages; decides which links it crosses.
        library: that sends the tokens to their experts (eq. H7), each of `size_bytes` / tokens;
            `None`: pattern and group are timed.
        copies: of a token that such a library sends at most: its experts.
        once: whether a GPU gets one copy of a token, however many of its experts it holds.
    """

    name: str
    equation: str
    pattern: str
    group: int
    repeats: int
    size_bytes: NDArray[np.float64] | float
    stride: int = 1
    library: AllToAllLibrary | None = None
    copies: int = 1
    once: NDArray[np.bool_] | bool = False


NORM_BYTES = 4
"""Sums of squares are exchanged in 32 bits."""


def step_exchanges(
    model: ModelSpec,
    load: StepLoad,
    *,
    slicing: Slicing,
    sends_to_experts: bool,
    library: AllToAllLibrary | None = None,
) -> tuple[Exchange, ...]:
    """
    List the collectives that a step meets on its way through the model and all its stages.

    Tokens go to all GPUs of the stage on their way to experts, which is the default of vLLM 0.29.0
    (`allgather_reducescatter`) and SGLang; where the engine *sends_to_experts*, to the groups of
    their own experts alone once there are more groups than a token has experts. With a *library*
    they always go there.

    Returns:
        Exchanges whose sizes have the shape of *load*; none on a single GPU.
    """
    return (
        *_tensor_exchanges(model, load, slicing),
        *_expert_exchanges(model, load, slicing, library, sends_to_experts=sends_to_experts),
        *_stage_exchanges(model, load, slicing),
    )


def _tensor_exchanges(model: ModelSpec, load: StepLoad, slicing: Slicing) -> tuple[Exchange, ...]:
    """
    All-reduces of the hidden state and the gather of the logits, over the tp GPUs of a copy.

        S = m h a, after the embedding, each attention and each feed-forward; B V a for the logits;
        8 m for squares of queries and keys, in 32 bits, where one norm spans all heads
        (docs/model.md, eq. X1 and X3)

    Where attention and feed-forward stand side by side they are summed and reduced once.
    With experts and copies of attention the feed-forward of expert layers ends in the
    exchanges of eq. X2, which leave no partial sums over tp.
    """
    if slicing.tp == 1:
        return ()
    hidden = load.tokens * model.hidden_size * ACTIVATION_BYTES
    logits = load.logits * model.vocab_size * ACTIVATION_BYTES
    by_attention = (
        0 if model.parallel_attention else model.num_attention_layers + model.num_linear_layers
    )
    by_feedforward = model.num_ffn_layers if slicing.dp == 1 else model.num_dense_layers
    norms = model.num_attention_layers if model.query_norm == "all" else 0
    squares = 2 * load.tokens * NORM_BYTES
    found = (
        Exchange("embedding all-reduce", "X1", "all-reduce", slicing.tp, 1, hidden),
        Exchange("attention all-reduce", "X1", "all-reduce", slicing.tp, by_attention, hidden),
        Exchange("ffn all-reduce", "X1", "all-reduce", slicing.tp, by_feedforward, hidden),
        Exchange("logits gather", "X1", "all-gather", slicing.tp, 1, logits),
        Exchange("query norm all-reduce", "X3", "all-reduce", slicing.tp, norms, squares),
    )
    return tuple(exchange for exchange in found if exchange.repeats)


def _expert_exchanges(
    model: ModelSpec,
    load: StepLoad,
    slicing: Slicing,
    library: AllToAllLibrary | None,
    *,
    sends_to_experts: bool,
) -> tuple[Exchange, ...]:
    """
    Bring the tokens of all copies of attention to the experts, and the results back.

        Gather and scatter: S = dp m h a, the tokens of all copies      (docs/model.md, eq. X2)
        All to all, ep > k: S = k m h w / tp to the experts, k m h a / tp back        (eq. X5)
        By a library: S = m h w / tp and m h a / tp, copied as often as eq. H7 says   (eq. X6)

    Each GPU sends its share m / tp of a copy's tokens, and an all-gather of m h a over tp rejoins
    them.
    """
    if slicing.dp == 1 or model.moe is None:
        return ()
    layers, stage = model.num_expert_layers, slicing.tp * slicing.dp
    copy = load.tokens * model.expert_width * ACTIVATION_BYTES
    chosen = model.moe.experts_per_token
    narrow = min(1.0, DTYPE_BYTES[model.weight_dtype] / ACTIVATION_BYTES)
    found: tuple[Exchange, ...]
    if library is not None and slicing.routes_tokens:
        own, once = copy / slicing.tp, load.prompts > 0
        found = tuple(
            Exchange(name, "X6", "all-to-all", stage, layers, size, library=library, copies=chosen,
                     once=once)
            for name, size in (("expert dispatch", own * narrow), ("expert combine", own))
        )  # fmt: skip
    elif sends_to_experts and slicing.ep > chosen:
        back = chosen * copy / slicing.tp
        found = (
            Exchange("expert dispatch", "X5", "all-to-all", stage, layers, back * narrow),
            Exchange("expert combine", "X5", "all-to-all", stage, layers, back),
        )
    else:
        found = (
            Exchange("expert gather", "X2", "all-gather", stage, layers, slicing.dp * copy),
            Exchange("expert scatter", "X2", "reduce-scatter", stage, layers, slicing.dp * copy),
        )
    if slicing.tp == 1:
        return found
    return *found, Exchange("expert rejoin", "X2", "all-gather", slicing.tp, layers, copy)


def _stage_exchanges(model: ModelSpec, load: StepLoad, slicing: Slicing) -> tuple[Exchange, ...]:
    """
    Hand hidden state and residual to the next pipeline stage.

        S = 2 m h a / tp, then an all-gather of 2 m h a over tp      (docs/model.md, eq. X4)
    """
    if slicing.pp == 1:
        return ()
    size = 2 * load.tokens * model.hidden_size * ACTIVATION_BYTES
    sends, stride, part = slicing.pp - 1, slicing.tp * slicing.dp, size / slicing.tp
    send = Exchange("stage send", "X4", "point-to-point", 2, sends, part, stride=stride)
    if slicing.tp == 1:
        return (send,)
    return send, Exchange("stage gather", "X4", "all-gather", slicing.tp, sends, size)
