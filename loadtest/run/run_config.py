"""The job of a run, made from the options of a load test or from a plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from loadtest.run.folder import PLAN
from loadtest.run.job import (
    FIRST_PLAIN_TOKEN,
    Job,
    default_warmup_s,
    slowest_s,
    timeout_s,
)
from loadtest.run.schedule import (
    WARMUP_ROUNDS,
    ArrivalShape,
    RateStage,
    Window,
    duration_s,
    mean_per_s,
    window_of,
)
from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Options, Positive, Whole
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.lengths import length_rows
from minicluster.workload.sample_size import requests_to_judge
from minicluster.workload.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.plan import Plan
    from minicluster.workload.schedule import ScheduledRequest

MAX_WORKERS = 64
"""Largest number of client processes; no machine of one user has more cores to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestLoad:
    """
    The load and its SLO, which a plan determines if `planned`.

    Attributes:
        model: served name; `None`: the only one served.
        vocab_size: upper bound of the prompts' random token ids.
        e2e_s: expected time of one request.
    """

    model: str | None
    vocab_size: int
    workload: WorkloadSpec
    slo: SloSpec
    e2e_s: float
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength(Options):
    """
    The length of a run: measured seconds or requests, after a warm-up; `None`: the default.

    Its `timeout_s` is the time limit of a request.
    """

    _NAMED: ClassVar[dict[str, str]] = {
        "duration_s": "duration",
        "num_requests": "requests",
        "warmup_s": "warmup",
        "timeout_s": "timeout",
    }

    duration_s: Positive | None = None
    num_requests: Count | None = None
    warmup_s: NotNegative | None = None
    timeout_s: Positive | None = None
    seed: Whole = 0

    def _check(self) -> None:
        if self.duration_s is not None and self.num_requests is not None:
            raise InputError("--requests", self.num_requests, "no such option with --duration")


def planned_load(plan: Plan) -> TestLoad:
    """Return the load and the SLO of *plan*."""
    return TestLoad(
        model=plan.model.id,
        vocab_size=plan.model.vocab_size,
        # Of a trace that the plan was made from, lengths and rate; `--trace` replays it.
        workload=replace(plan.workload, trace=None),
        slo=plan.inputs.scenario.slo,
        e2e_s=plan.prediction.e2e.mean_s,
        planned=True,
    )


def free_load(
    workload: WorkloadSpec, slo: SloSpec, *, model: str | None, vocab_size: int
) -> TestLoad:
    """Return a load without a plan; the expected time of a request is what the SLO allows."""
    if vocab_size <= FIRST_PLAIN_TOKEN:
        raise InputError("--vocab-size", vocab_size, f"more than {FIRST_PLAIN_TOKEN}")
    return TestLoad(
        model=model,
        vocab_size=vocab_size,
        workload=workload,
        slo=slo,
        e2e_s=slowest_s(slo, workload),
        planned=False,
    )


def make_job(
    load: TestLoad,
    length: RunLength,
    *,
    host: str,
    shape: ArrivalShape | None = None,
    workers: int = 1,
) -> Job:
    """
    Return the job of a run against *host*, with window, time limit and prompt salt.

    Its model is empty if *load* names none.

    Raises InputError: length, shape and load exclude each other.
    """
    if not 1 <= workers <= MAX_WORKERS:
        raise InputError("--processes", workers, f"from 1 to {MAX_WORKERS}")
    shape = shape or ArrivalShape()
    _check_options(load, length, shape)
    warmup_s = length.warmup_s if length.warmup_s is not None else default_warmup_s(load.e2e_s)
    workload = load.workload
    if workload.trace:
        workload = replace(
            _traced(workload.trace, shape),
            lora_adapters=workload.lora_adapters,
            lora_popularity_exponent=workload.lora_popularity_exponent,
        )
    if shape.stages:
        workload = workload.at_rate(mean_per_s(shape.stages))
        shape, warmup_s = _with_warmup_stage(shape, warmup_s)
    limit_s = length.timeout_s or timeout_s(load.slo, workload)
    source = shape.source
    drain_s = source.turns * limit_s + (source.turns - 1) * source.think_s
    base = Window(start_s=warmup_s, end_s=warmup_s, drain_s=drain_s)
    job = Job(
        host=host,
        model=load.model or "",
        vocab_size=load.vocab_size,
        seed=length.seed,
        prompt_salt=time.time_ns(),
        workload=workload,
        slo=load.slo,
        window=base,
        timeout_s=limit_s,
        shape=shape,
        num_requests=length.num_requests or requests_to_judge(load.workload, load.slo),
        workers=workers,
        plan=PLAN if load.planned else None,
    )
    return replace(job, window=_window(job, length, load.e2e_s))


def _window(job: Job, length: RunLength, e2e_s: float) -> Window:
    """Return the window of the arrivals that count; an estimate for a closed loop."""
    base, shape = job.window, job.shape
    if shape.closed:
        round_s = e2e_s + shape.source.think_s
        rounds = job.num_requests / (shape.source.users or 1)
        start_s = WARMUP_ROUNDS * round_s
        return replace(base, start_s=start_s, end_s=start_s + rounds * round_s)
    if length.duration_s is not None:
        return replace(base, end_s=base.start_s + length.duration_s)
    if shape.stages:
        return replace(base, end_s=duration_s(shape.stages))
    num_requests = length.num_requests if job.workload.trace else job.num_requests
    return window_of(job.workload, shape, base, num_requests=num_requests, seed=job.seed)


def _with_warmup_stage(shape: ArrivalShape, warmup_s: float) -> tuple[ArrivalShape, float]:
    """Put the warm-up before the stages, at their first rate; a ramp from 0 needs none."""
    per_s = shape.stages[0].start_per_s
    if not per_s or not warmup_s:
        return shape, 0.0
    warmup = RateStage(start_per_s=per_s, end_per_s=per_s, duration_s=warmup_s)
    return replace(shape, stages=(warmup, *shape.stages)), warmup_s


def _check_options(load: TestLoad, length: RunLength, shape: ArrivalShape) -> None:
    source, trace, staged = shape.source, load.workload.trace, bool(shape.stages)
    users, stages = (f"no such option with {name}" for name in ("--users", "--stages"))
    rounds = f"{users}: each user's first {WARMUP_ROUNDS} requests do not count"
    plain = ArrivalShape()
    shaped = (source, shape.stages) != (plain.source, plain.stages)
    alone = not shape.closed and source.turns == 1
    needed = "--users or --turns beside it: otherwise no request follows another"
    refused = (
        (shape.closed, "--duration", length.duration_s, f"{users}: --requests ends a closed loop"),
        (shape.closed, "--warmup", length.warmup_s, rounds),
        (staged, "--duration", length.duration_s, f"{stages}: the stages have durations"),
        (staged, "--requests", length.num_requests, stages),
        (shaped, "--trace", trace, "no other arrival options: a trace has its own arrivals"),
        (alone, "--think", source.think_s or None, needed),
    )
    for applies, option, value, expectation in refused:
        if applies and value is not None:
            raise InputError(option, value, expectation)
    if (shape.skip_unanswered or shape.reading != plain.reading) and not trace:
        expected = "a file for --skip-unanswered, and for the options that say how to read it"
        raise InputError("--trace", None, expected)


def check_chat(job: Job, requests: Sequence[ScheduledRequest]) -> None:
    """
    Refuse chats whose prompts have no known length, or are no longer than the chat template.

    Raises InputError: conversations of turns, or no room for a word in the shortest of *requests*.
    """
    if not job.chat:
        return
    if job.shape.source.turns > 1:
        expectation = "1 with --api chat: a chat template adds unknown tokens to a turn"
        raise InputError("--turns", job.shape.source.turns, expectation)
    shortest = min(request.input_tokens for request in requests)
    if shortest <= job.chat.overhead_tokens:
        raise InputError(
            "--api",
            f"chat with prompts of {shortest} tokens",
            f"more than the {job.chat.overhead_tokens} of the chat template",
        )


def _traced(file: str, shape: ArrivalShape) -> WorkloadSpec:
    arrivals = read_trace(Path(file), shape.reading, skip_unanswered=shape.skip_unanswered).arrivals
    span_s, prefix = float(arrivals.due_s[-1]), arrivals.prefix_tokens
    return WorkloadSpec(
        requests_per_s=(len(arrivals) - 1) / span_s if span_s else float(len(arrivals)),
        lengths=length_rows(arrivals.input_tokens, arrivals.output_tokens, place=file),
        prefix_tokens=0 if prefix is None else int(prefix.max()),
        trace=file,
    )


def parse_lengths(text: str, option: str) -> Lengths:
    """
    Parse token counts: `512`, `256-768` (uniform), or `lognormal:MEDIAN:SIGMA:MAX`.

    Raises InputError: another form, or numbers out of range; *option* is named.
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
        expectation = "tokens: 512, 256-768, or lognormal:MEDIAN:SIGMA:MAX"
        raise InputError(option, text, expectation) from None
    except InputError as error:
        raise InputError(f"{option} {error.place}", error.value, error.expectation) from None
