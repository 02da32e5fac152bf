"""Sources of requests: open loop with random gaps, closed loop of users, conversations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Positive, Spec, choice, positive
from minicluster.workload import PROCESSES
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.lengths import sample_requests

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.workload import WorkloadSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSource(Spec):
    """
    Where requests come from.

    Attributes:
        process: gaps between arrivals: `poisson` exponential, `gamma` with the coefficient of
            variation *gap_cv* (above 1: bursts), `constant` all alike.
        gap_cv: only for gamma.
        users: closed loop: that many users, each sending its next request when the last one is
            answered; `None`: open loop, at the workload's rate.
        turns: requests of a conversation; each prompt is the conversation so far and a new input.
        think_s: from an answer to the same user's or conversation's next request; of users the
            mean of an exponential distribution, because requests of users who all think alike come
            in bursts: those that were in one batch end together.
    """

    process: Annotated[str, choice(*PROCESSES)] = "poisson"
    gap_cv: Positive | None = None
    users: Count | None = None
    turns: Count = 1
    think_s: NotNegative = 0.0

    def _check(self) -> None:
        if (self.gap_cv is None) == (self.process == "gamma"):
            raise InputError("gap_cv", self.gap_cv, "a number for gamma gaps, else none")
        if self.users is not None and (self.process != "poisson" or self.turns > 1):
            raise InputError("users", self.users, "none with other gaps or turns: a closed loop")


def drawn(workload: WorkloadSpec, source: RequestSource, *, count: int, seed: int) -> Arrivals:
    """
    Draw *count* requests.

    Gaps, prompt lengths, output lengths, classes and adapters come from independent streams of
    *seed*, so that changing one distribution leaves the draws of the others as they were.

    Raises InputError: *count* is not positive, or users or turns of several classes.

    Ignores: With turns: the arrivals' rate is that of requests while conversations come in full;
    the last conversation may be cut.
    """
    positive(count=count)
    if workload.classes and (source.users is not None or source.turns > 1):
        key = "turns" if source.users is None else "users"
        expected = "none with classes of requests, which have rates: plan each on its own"
        raise InputError(key, getattr(source, key), expected)
    gaps, *others, adapters = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(5)
    )
    requests = _requests(workload, count, *others)
    return _timed(workload, source, requests, gaps).with_adapters(workload, adapters)


def _timed(
    workload: WorkloadSpec, source: RequestSource, requests: Arrivals, gaps: np.random.Generator
) -> Arrivals:
    count = len(requests)
    if source.users is not None:
        number = np.arange(count)
        previous = np.where(number < source.users, -1, number - source.users)
        think_s = gaps.exponential(source.think_s, size=count)
        # Users think before their first request, too.
        due_s = np.where(number < source.users, think_s, 0.0)
        due_s[: source.users].sort()
        return replace(requests, due_s=due_s, previous=previous, think_s=think_s)
    starts = -(-count // source.turns)
    due_s = np.cumsum(_gaps_s(source, starts, source.turns / workload.requests_per_s, gaps))
    if source.turns == 1:
        return replace(requests, due_s=due_s)
    return _conversations(source, due_s, requests)


def _requests(
    workload: WorkloadSpec,
    count: int,
    prompts: np.random.Generator,
    outputs: np.random.Generator,
    classes: np.random.Generator,
) -> Arrivals:
    parts = workload.parts
    bounds = np.cumsum([part.requests_per_s for part in parts])
    class_of = np.searchsorted(bounds[:-1] / bounds[-1], classes.random(count), side="right")
    lengths = np.empty((3, count), dtype=np.int64)
    for at, part in enumerate(parts):
        own = class_of == at
        number = int(own.sum())
        lengths[:2, own] = sample_requests(part, number, prompts, outputs)
        lengths[2, own] = part.prefix_tokens
    return Arrivals(
        due_s=np.zeros(count),
        input_tokens=lengths[0],
        output_tokens=lengths[1],
        prefix_tokens=lengths[2],
        class_of=class_of if workload.classes else None,
    )


def _gaps_s(
    source: RequestSource, count: int, mean_s: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    if source.process == "constant":
        return np.full(count, mean_s)
    if source.gap_cv is not None:
        shape = source.gap_cv**-2
        return rng.gamma(shape, mean_s / shape, size=count)
    return rng.exponential(mean_s, size=count)


def _conversations(
    source: RequestSource, starts: NDArray[np.float64], requests: Arrivals
) -> Arrivals:
    """Chain each conversation's turns; a prompt contains all earlier turns."""
    number = np.arange(len(requests))
    session, turn = number // source.turns, number % source.turns
    total = np.cumsum(requests.input_tokens + requests.output_tokens)
    before = np.concatenate([[0], total])[session * source.turns]
    return replace(
        requests,
        due_s=np.where(turn == 0, starts[session], np.inf),
        input_tokens=total - requests.output_tokens - before,
        previous=np.where(turn == 0, -1, number - 1),
        think_s=np.full(len(requests), source.think_s),
        session=session,
    )
