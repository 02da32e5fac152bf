"""From what the user asked for to a job."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loadtest.job import FIRST_PLAIN_TOKEN, Job, default_warmup_s, slowest_s, timeout_s
from loadtest.run import PLAN
from loadtest.schedule import Window, window_of
from sizing.errors import InputError
from sizing.specs.slo import SloSpec
from sizing.specs.workload import Lengths, WorkloadSpec

if TYPE_CHECKING:
    from sizing.plan import Plan

DEFAULT_REQUESTS = 400
"""Enough for a p99 (368) with a margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    What to send and what is promised.

    Attributes:
        model: served name; `None`: the only one served.
        vocab_size: prompts are random token ids below it.
        e2e_s: how long one request is expected to take.
    """

    model: str | None
    vocab_size: int
    workload: WorkloadSpec
    slo: SloSpec
    e2e_s: float
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long to measure: seconds or requests, after a warm-up; `None`: the default."""

    duration_s: float | None = None
    num_requests: int | None = None
    warmup_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that it is one way of saying it, with sense."""
        if self.duration_s is not None and self.num_requests is not None:
            raise InputError("--requests", self.num_requests, "not together with --duration")
        if self.duration_s is not None and not 0 < self.duration_s < float("inf"):
            raise InputError("--duration", self.duration_s, "more than 0 seconds")
        if self.num_requests is not None and self.num_requests < 1:
            raise InputError("--requests", self.num_requests, "at least 1")
        if self.warmup_s is not None and not 0 <= self.warmup_s < float("inf"):
            raise InputError("--warmup", self.warmup_s, "0 seconds or more")
        if self.seed < 0:
            raise InputError("--seed", self.seed, "0 or more")


def planned_load(plan: Plan) -> Load:
    """Return the load and the promise that *plan* is for."""
    if plan.workload.trace:
        raise InputError("workload.trace", plan.workload.trace, "none: runs draw Poisson arrivals")
    return Load(
        model=plan.model.id,
        vocab_size=plan.inputs.model.vocab_size,
        workload=plan.workload,
        slo=plan.slo,
        e2e_s=plan.prediction.e2e.mean_s,
        planned=True,
    )


def free_load(workload: WorkloadSpec, slo: SloSpec, *, model: str | None, vocab_size: int) -> Load:
    """Return a load without a plan; a request is expected to take what the SLO allows it."""
    if vocab_size <= FIRST_PLAIN_TOKEN:
        raise InputError("--vocab-size", vocab_size, f"more than {FIRST_PLAIN_TOKEN}")
    return Load(
        model=model,
        vocab_size=vocab_size,
        workload=workload,
        slo=slo,
        e2e_s=slowest_s(slo, workload),
        planned=False,
    )


def make_job(load: Load, extent: Extent, *, host: str, model: str) -> Job:
    """Fix window, time limit and prompts of a run against *host*."""
    start_s = extent.warmup_s if extent.warmup_s is not None else default_warmup_s(load.e2e_s)
    limit_s = timeout_s(load.slo, load.workload)
    window = Window(start_s=start_s, end_s=start_s, drain_s=limit_s)
    if extent.duration_s is not None:
        window = replace(window, end_s=start_s + extent.duration_s)
    else:
        num = extent.num_requests or DEFAULT_REQUESTS
        window = window_of(load.workload, window, num_requests=num, seed=extent.seed)
    return Job(
        host=host,
        model=model,
        vocab_size=load.vocab_size,
        seed=extent.seed,
        prompt_salt=time.time_ns(),
        workload=load.workload,
        slo=load.slo,
        window=window,
        timeout_s=limit_s,
        plan=PLAN if load.planned else None,
    )


def parse_lengths(text: str, option: str) -> Lengths:
    """
    Read token counts: `512`, `256-768` (uniform), or `lognormal:MEDIAN:SIGMA:LONGEST`.

    Raises:
        InputError: none of these, or numbers without sense; *option* is named.

    """
    try:
        if text.startswith("lognormal:"):
            _, median, sigma, high = text.split(":")
            return Lengths(
                distribution="lognormal", median=float(median), sigma=float(sigma), high=int(high)
            )
        low, dash, high = text.partition("-")
        if dash and low:
            return Lengths(distribution="uniform", low=int(low), high=int(high))
        return Lengths.fixed(int(text))
    except ValueError:
        raise InputError(
            option, text, "tokens: 512, 256-768, or lognormal:MEDIAN:SIGMA:LONGEST"
        ) from None
    except InputError as error:
        raise InputError(f"{option} {error.place}", error.value, error.expectation) from None
