"""The load of one step, its work, and the op that does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.specs.model import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """
    Arrays of one shape; each element is one step.

    Attributes:
        prompts: prompts prefilled in the step.
        prompt_tokens: n, tokens computed of each of them.
        cached_tokens: p, tokens before these that are cached already.
        sequences: B, sequences decoded.
        context_tokens: s, mean tokens cached per decoded sequence.
        queries: tokens computed of each decoded sequence: itself and the drafts that are verified.
        sampled: of these, those whose logits are needed.
    """

    prompts: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    cached_tokens: NDArray[np.float64]
    sequences: NDArray[np.float64]
    context_tokens: NDArray[np.float64]
    queries: float = 1.0
    sampled: float = 1.0

    @property
    def tokens(self) -> NDArray[np.float64]:
        """Rows of every GEMM but lm_head."""
        return self.prompts * self.prompt_tokens + self.sequences * self.queries

    @property
    def half(self) -> StepLoad:
        """
        One of two halves with as many tokens, and as many pairs of tokens that attend.

        Several prompts are dealt out; a single one is cut, and its halves stand for their mean.
        """
        prompts = np.where(self.prompts > 0, np.maximum(1.0, self.prompts / 2), 0.0)
        parts = self.prompts / (2 * np.where(self.prompts > 0, prompts, 1.0))
        tokens = self.prompt_tokens * parts
        return replace(
            self, prompts=prompts, prompt_tokens=tokens, sequences=self.sequences / 2,
            cached_tokens=self.cached_tokens + (self.prompt_tokens - tokens) / 2 * (prompts > 0),
        )  # fmt: skip

    @property
    def logits(self) -> NDArray[np.float64]:
        """Rows of lm_head: the last token of each prompt, and what is sampled of sequences."""
        return self.prompts + self.sequences * self.sampled


def prefill_load(tokens: ArrayLike, cached: ArrayLike = 0) -> StepLoad:
    """One prompt of *tokens* tokens after *cached* ones, nothing decoded."""
    n, p = np.broadcast_arrays(np.asarray(tokens, np.float64), np.asarray(cached, np.float64))
    none = np.zeros_like(n)
    return StepLoad(
        prompts=none + 1, prompt_tokens=n, cached_tokens=p, sequences=none, context_tokens=none
    )


def decode_load(batch: ArrayLike, context: ArrayLike) -> StepLoad:
    """*batch* sequences with *context* cached tokens each, nothing prefilled."""
    b, s = np.broadcast_arrays(np.asarray(batch, np.float64), np.asarray(context, np.float64))
    none = np.zeros_like(b)
    return StepLoad(
        prompts=none, prompt_tokens=none, cached_tokens=none, sequences=b, context_tokens=s
    )


def joined(loads: Sequence[StepLoad]) -> StepLoad:
    """Return the steps of several loads, of one dimension each, one load after the other."""
    parts = {
        name: np.concatenate([getattr(load, name) for load in loads])
        for name in ("prompts", "prompt_tokens", "cached_tokens", "sequences", "context_tokens")
    }
    return replace(loads[0], **parts)


def pairs(
    tokens: NDArray[np.float64],
    cached: NDArray[np.float64],
    window: int = 0,
    *,
    chunked: bool = False,
) -> NDArray[np.float64]:
    """
    Query-key pairs of one prompt.

        A = n (p + (n + 1) / 2);  window w: q p + q (q + 1) / 2 + (n - q) w,
        q = min(n, max(0, w - p));  chunks of w: G(p + n) - G(p),
        G(x) = floor(x / w) w (w + 1) / 2 + r (r + 1) / 2, r = x mod w
        (docs/model.md, eq. W2)

    Args:
        tokens: n, computed now.
        cached: p, before them.
        window: w, keys that a query sees at most, itself included; 0: all.
        chunked: a query sees what is before it in its chunk of w, not the last w.

    Source:
        The i-th new token attends to p + i keys, or to w of them.

    Ignores:
        Kernels that compute masked pairs of a diagonal block: in the efficiency.
    """
    if not window:
        return np.asarray(tokens * (cached + (tokens + 1) / 2))
    if chunked:
        return np.asarray(_chunk_pairs(cached + tokens, window) - _chunk_pairs(cached, window))
    q = np.clip(window - cached, 0, tokens)
    return np.asarray(q * cached + q * (q + 1) / 2 + (tokens - q) * window)


def _chunk_pairs(tokens: NDArray[np.float64], chunk: int) -> NDArray[np.float64]:
    rest = tokens % chunk
    return np.asarray(tokens // chunk * (chunk * (chunk + 1) / 2) + rest * (rest + 1) / 2)


def keys_in_reach(
    context: NDArray[np.float64], window: int, *, chunked: bool
) -> NDArray[np.float64]:
    """
    Keys before a token that it may attend to: all, the last *window*, or those of its chunk.

    Beyond the first chunk, sequences are taken to be anywhere in theirs: half of it on average.
    """
    if not window:
        return context
    if chunked:
        return np.asarray(np.where(context <= window, context, (window + 1) / 2))
    return np.asarray(np.minimum(context, window))


ACTIVATION_BYTES = DTYPE_BYTES["bf16"]
"""Activations are kept in 16 bits whatever the dtype of the weights."""


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of HBM traffic on one GPU."""

    flops: NDArray[np.float64]
    hbm_bytes: NDArray[np.float64]

    def __mul__(self, times: float) -> Work:
        """Do it *times* times."""
        return Work(flops=self.flops * times, hbm_bytes=self.hbm_bytes * times)


@dataclass(frozen=True, slots=True)
class Op:
    """
    One kernel, run `repeats` times a step.

    Attributes:
        equation: of its work, in docs/model.md.
        kind: decides which efficiency applies, see `roofline`.
        dtype: of the weights it streams (GEMM), else of what it computes in.
        work: of one run, on one GPU.
        rows: m of a GEMM; of a grouped GEMM, rows of all its groups; query tokens of one prompt
            in prefill attention; sequences in decode attention.
        columns: n of a GEMM or of one group.
        inner: k of a GEMM or of one group.
        groups: experts that a grouped GEMM runs, on this GPU.
        keys: keys that each query sees at most in attention.
        heads: query heads on this GPU, in attention.
        head_dim: of a query, in attention.
        kv_dtype: of the cache that decode attention reads.
        block_scaled: activations of a GEMM in 8 bits are scaled in blocks before it, which counts
            as part of it.
    """

    name: str
    equation: str
    kind: str
    dtype: str
    repeats: int
    work: Work
    rows: NDArray[np.float64] | float = 0.0
    columns: NDArray[np.float64] | float = 0.0
    inner: NDArray[np.float64] | float = 0.0
    groups: NDArray[np.float64] | None = None
    keys: NDArray[np.float64] | float = 1.0
    heads: NDArray[np.float64] | float = 1.0
    head_dim: NDArray[np.float64] | float = 1.0
    kv_dtype: str | None = None
    block_scaled: bool = False

    @property
    def total(self) -> Work:
        """Work of all its runs in the step."""
        return self.work * self.repeats


def gemm(  # noqa: PLR0913  (a GEMM has three sizes, a dtype and a name)
    name: str,
    equation: str,
    rows: NDArray[np.float64],
    inner: float,
    columns: float,
    *,
    dtype: str,
    repeats: int,
) -> Op:
    """
    Multiply *rows* x *inner* activations with *inner* x *columns* weights.

        F = 2 m n k,  Q = n k w + m (n + k) a      (docs/model.md, eq. W1)

    Returns:
        The op; a GEMM without rows is not launched and reads nothing.

    Source:
        Every weight and activation moves once between HBM and the chip.

    Ignores:
        Activations that stay in cache between two kernels.
    """
    weights = inner * columns * DTYPE_BYTES[dtype] * (rows > 0)
    activations = rows * (inner + columns) * ACTIVATION_BYTES
    work = Work(2 * rows * inner * columns, weights + activations)
    return Op(name, equation, "gemm", dtype, repeats, work, rows=rows, columns=columns, inner=inner)
