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
from minicluster.workload.schedule import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.workload import WorkloadSpec


CONTENT_TOKENS = 512  # tokens of a content block with an id, as in the published Mooncake traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """
    Columns of `ScheduledRequest`, in the order of arrival; `None`: the same of all of them.

    Attributes:
        due_s: arrival times from the start, ascending, shape (n,), like the arrays below; of a
            request that waits for another without a meaning.
        previous: -1: none, as of session and adapter.
        content: of each request, ids of blocks of `CONTENT_TOKENS`.
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
        """Return the same requests at a rate, or refuse if all of them come at one time."""
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

    def requests(self, counts: NDArray[np.bool_] | None = None) -> tuple[ScheduledRequest, ...]:
        """Return a row for each request, `in_window` as *counts* says, shape (n,)."""
        columns = self.columns() if counts is None else self.columns() | {"in_window": counts}
        lists = [c if isinstance(c, tuple) else c.tolist() for c in columns.values()]
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True))
        return tuple(_request(index, row) for index, row in enumerate(rows))


def _request(index: int, row: dict[str, Any]) -> ScheduledRequest:
    none = {name for name in ("previous", "session", "adapter") if row.get(name) == -1}
    if "previous" in row:
        row |= {"think_s": 0.0} if "previous" in none else {"due_s": 0.0}
    row["prefix_tokens"] = min(row.get("prefix_tokens", 0), row["input_tokens"])
    return ScheduledRequest(index=index, **{k: v for k, v in row.items() if k not in none})


def arrivals_of(requests: Sequence[ScheduledRequest]) -> Arrivals:
    """Return at least one request that waits for none as columns, the first at 0 seconds."""

    def column(name: str, none: int = 0) -> NDArray[np.int64] | None:
        values = [getattr(request, name) for request in requests]
        if all(value in {None, none} for value in values):
            return None
        return np.array([none if value is None else value for value in values], dtype=np.int64)

    due_s = np.array([request.due_s for request in requests])
    content = tuple(request.content for request in requests)
    return Arrivals(
        due_s=due_s - due_s[0],
        input_tokens=np.array([request.input_tokens for request in requests]),
        output_tokens=np.array([request.output_tokens for request in requests]),
        content=content if any(content) else None,
        prefix_tokens=column("prefix_tokens"),
        session=column("session", -1),
        adapter=column("adapter", -1),
    )


class EquallyLikely(NamedTuple):
    """
    Requests of a workload that stand for all of them, by ascending prompts, arrays of shape (n,).

    An answer of `lengths` is that to the prompt beside it; of two distributions, their order says
    nothing. `class_of` numbers the workload's classes.
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
    numbered = list(zip(parts, counts.astype(int).tolist(), strict=True))
    lengths = [request_quantiles(part, number) for part, number in numbered]
    prompts, answers = (np.concatenate(column) for column in zip(*lengths, strict=True))
    order = np.argsort(prompts, kind="stable")
    return EquallyLikely(prompts[order], answers[order], class_of[order])
