"""Arrivals and lengths; the same seed gives the simulator and the load test the same requests."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import InputError
from minicluster.specs.lora import popularity
from minicluster.workload.lengths import request_quantiles

if TYPE_CHECKING:
    from minicluster.specs.workload import WorkloadSpec


CONTENT_TOKENS = 512
"""Tokens of a content block with an id, as in the published Mooncake traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """
    Requests in order of arrival.

    Attributes:
        due_s: arrival times from the start, ascending, shape (n,), like the arrays below.
        previous: index of the request that has to be answered first, -1: none;
            `None`: no request waits for another. `due_s` of a waiting request has no meaning.
        think_s: from the end of the previous request to the arrival of this one.
        prefix_tokens: prompt tokens that are in the prefix cache of every replica.
        session: conversation, whose earlier turns are a prefix of the prompt; -1: none.
        class_of: class of each, as numbered in the workload; `None`: there are none.
        content: for each request, ids of its prompt's whole blocks of `CONTENT_TOKENS`; equal ids
            mean equal tokens. `None`: unknown.
        adapter: LoRA adapter of each, the most popular one 0; `None`: none.
    """

    due_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    previous: NDArray[np.int64] | None = None
    think_s: NDArray[np.float64] | None = None
    prefix_tokens: NDArray[np.int64] | None = None
    session: NDArray[np.int64] | None = None
    class_of: NDArray[np.int64] | None = None
    content: tuple[tuple[int, ...], ...] | None = None
    adapter: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Count the requests."""
        return len(self.due_s)

    def at_rate(self, requests_per_s: float) -> Arrivals:
        """
        Return the same requests with their time stretched to a rate.

        Raises InputError: all of them come at one time.
        """
        due, last = self.due_s, len(self) - 1
        if last < 1 or due[-1] == 0:
            raise InputError("rate", requests_per_s, "none: all requests come at one time")
        return replace(self, due_s=due * (last / (due[-1] * requests_per_s)))

    def with_adapters(self, workload: WorkloadSpec, rng: np.random.Generator) -> Arrivals:
        """
        Return the same requests with adapters drawn by a workload's popularity, if it has any.

        A conversation keeps its adapter. Equal blocks of different adapters are different contents,
        because adapters change keys and values: the ids get the adapter into them.
        """
        count = workload.lora_adapters
        if not count or self.adapter is not None:
            return self
        shares = popularity(count, workload.lora_popularity_exponent)
        adapter = rng.choice(count, size=len(self), p=shares)
        if self.session is not None:
            adapter = np.where(self.session >= 0, adapter[self.session % len(self)], adapter)
        content = self.content and tuple(
            tuple(block * count + at for block in blocks)
            for blocks, at in zip(self.content, adapter.tolist(), strict=True)
        )
        return replace(self, adapter=adapter, content=content)

    def columns(self) -> dict[str, Any]:
        """Return the attributes that are known, by name: a value for each request."""
        named = ((column.name, getattr(self, column.name)) for column in fields(self))
        return {name: values for name, values in named if values is not None}


class EquallyLikely(NamedTuple):
    """
    Requests of a workload that stand for all of them, arrays of shape (n,).

    Attributes:
        input_tokens: ascending.
        output_tokens: lengths of the class's answers: of `lengths`, that to the prompt beside it;
            of two distributions, their order says nothing.
        class_of: class of each, as numbered in the workload.
    """

    input_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    class_of: NDArray[np.int64]


SHARE_TOLERANCE = 0.01
"""Relative error of a class's share among the requests that stand for a workload."""


@lru_cache(maxsize=256)
def equally_likely(workload: WorkloadSpec, least: int) -> EquallyLikely:
    """
    Return equally likely requests: *least*, or as many more as give each class its share.

    Lengths are those of `request_quantiles`, in each class by itself.
    """
    parts = workload.parts
    shares = np.array([part.requests_per_s for part in parts])
    shares = shares / shares.sum()
    counts, total = np.rint(shares * least), least
    while np.abs(counts / (shares * total) - 1).max() > SHARE_TOLERANCE:
        total += 1
        counts = np.rint(shares * total)
    class_of = np.repeat(np.arange(len(parts)), counts.astype(int))
    each = list(zip(parts, counts.astype(int).tolist(), strict=True))
    lengths = [request_quantiles(part, number) for part, number in each]
    prompts, answers = (np.concatenate(column) for column in zip(*lengths, strict=True))
    order = np.argsort(prompts, kind="stable")
    return EquallyLikely(prompts[order], answers[order], class_of[order])
