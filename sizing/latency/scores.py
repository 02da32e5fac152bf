"""Attention scores of one layer, over the prompt and over the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sizing.latency.load import keys_in_reach, pairs
from sizing.latency.op import ACTIVATION_BYTES, Op, Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sizing.latency.load import StepLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """
    What one attention kernel costs per pair, query and key, on one GPU.

    Attributes:
        name: added to the op's name.
        equation: of its work, in docs/model.md.
        repeats: layers.
        heads: query heads.
        head_dim: of a query.
        flops_per_pair: of a query and a key, all heads together.
        values_per_query: values read and written per query.
        bytes_per_key: read of the cache.
        window: keys that a query sees at most; 0: all.
        chunked: the window is a chunk of the sequence.
        dtype: that it multiplies in.
        kv_dtype: of the cache.
    """

    name: str
    equation: str
    repeats: int
    heads: float
    head_dim: float
    flops_per_pair: float
    values_per_query: float
    bytes_per_key: float
    window: int = 0
    chunked: bool = False
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    def prefill(self, load: StepLoad) -> Op:
        """
        Scores of the prompts among themselves and over what is cached of them.

            F = 4 N H A,  Q = 2 n N H a + (n + p) 2 K' H w      (docs/model.md, eq. W3)
        """
        n, p = load.prompt_tokens, load.cached_tokens
        keys = n + keys_in_reach(p, self.window, chunked=self.chunked)
        work = Work(
            flops=self.flops_per_pair * pairs(n, p, self.window, chunked=self.chunked)
            * load.prompts,
            hbm_bytes=load.prompts
            * (n * self.values_per_query * ACTIVATION_BYTES + keys * self.bytes_per_key),
        )  # fmt: skip
        return self._op("prefill", work, rows=n, keys=keys)

    def decode(self, load: StepLoad) -> Op:
        """
        Scores of one token per sequence over its KV cache.

            F = 4 N H B s,  Q = B s 2 K' H w + 2 B N H a      (docs/model.md, eq. W3)
        """
        s = keys_in_reach(load.context_tokens, self.window, chunked=self.chunked)
        read = load.sequences * s
        queries = load.sequences * self.values_per_query * ACTIVATION_BYTES
        work = Work(
            flops=self.flops_per_pair * read,
            hbm_bytes=np.asarray(self.bytes_per_key * read + queries),
        )
        return self._op("decode", work, rows=load.sequences, keys=s)

    def _op(
        self, phase: str, work: Work, *, rows: NDArray[np.float64], keys: NDArray[np.float64]
    ) -> Op:
        """Name the op."""
        return Op(
            name=f"{self.name} {phase}",
            equation=self.equation,
            kind=f"{phase} attention",
            dtype=self.dtype,
            repeats=self.repeats,
            work=work,
            rows=rows,
            keys=keys,
            heads=self.heads,
            head_dim=self.head_dim,
            kv_dtype=self.kv_dtype,
        )
