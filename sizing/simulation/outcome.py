"""Results of a run: latencies, phases and replicas, request by request."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.phases import INGRESS, TTFT_PHASES
from minicluster.stats.batch_means import (
    BatchMeansInterval,
    mean_interval,
    quantile_interval,
    surely_below,
)
from minicluster.stats.shares import LEVELS
from minicluster.stats.warmup import mser5
from sizing.simulation.event_loop import SAMPLES, EventLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.workload.arrivals import Arrivals
    from sizing.simulation.system import Decoding, System

Column = NDArray[np.float64]

DRAIN = 0.99
"""Requests count that arrived before the last arrival by this quantile of E2E: later ones meet
replicas that empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """
    Queues and caches at some arrivals.

    Attributes:
        time_s: of the looks, shape (k,).
        waiting, running, kv_blocks: per role, over the pool, shape (k,) each.
    """

    time_s: Column
    waiting: dict[str, Column]
    running: dict[str, Column]
    kv_blocks: dict[str, Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Shown):
    """
    One run, request by request in the order of their numbers.

    Attributes:
        due_s, ttft_s, tpot_s, e2e_s, stall_s: shape (n,); `tpot_s` is nan for one token.
        class_of: class of requests, as numbered in the workload; 0 where there are none.
        parts_s: by `minicluster.phases.TTFT_PHASES`; they add up to `ttft_s`.
        prefill_of, decode_of: replicas; -1: the prompt was computed by its decode replica.
        gaps: seconds, how many, start; shape (g, 3), ascending by start.
        counts: whether a request counts, after the warm-up and before the end, shape (n,).
        settled: whether the run reached a steady state (eq. Q7).
        busy_fraction: per role, mean share of the time in which a replica computed.
        kv_capacity_blocks: per role, over the pool.
        host_tokens, disk_tokens: of `cached_tokens`, those loaded from host memory and from disk.
        adapter_loads: copies of adapters to slots of either pool that each request caused.
    """

    due_s: Column
    ttft_s: Column
    tpot_s: Column
    e2e_s: Column
    stall_s: Column
    class_of: NDArray[np.int64]
    parts_s: dict[str, Column] = field(repr=False)
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    prefill_of: NDArray[np.int64]
    decode_of: NDArray[np.int64]
    gaps: Column
    counts: NDArray[np.bool_]
    settled: bool
    busy_fraction: dict[str, float]
    kv_capacity_blocks: dict[str, int]
    occupancy: Occupancy
    host_tokens: NDArray[np.int64]
    disk_tokens: NDArray[np.int64]
    adapter_loads: NDArray[np.int64]

    def latencies(self, of: int | None = None) -> dict[str, dict[str, BatchMeansInterval]]:
        """Mean and percentiles of every latency, each with its interval, as `series` has them."""
        return {
            name: _statistics(*self.series(name, of))
            for name in ("ttft", "tpot", "e2e", "stall", "itl")
            if len(self.series(name, of)[0])
        }

    def surely_below(
        self, name: str, statistic: str, limit_s: float, of: int | None = None
    ) -> bool:
        """Say whether a limit holds at a percentile, beyond what chance may have done."""
        values, weights = self.series(name, of)
        if statistic == "mean":
            high_s = mean_interval(values, weights).high_s
            return high_s is not None and high_s <= limit_s
        return surely_below(values, limit_s, LEVELS[statistic], weights)

    def series(self, name: str, of: int | None = None) -> tuple[Column, Column | None]:
        """
        Values of a latency that count, in the order of time, and how often each does.

        Args:
            name: `ttft`, `tpot`, `itl`, `e2e` or `stall`.
            of: the class of requests that counts; `None`: all. A gap between tokens (`itl`) is of
                all classes always: a step gives every sequence in it a token.
        """
        if name == "itl":
            gaps = self.counted_gaps()
            return gaps[:, 0], gaps[:, 1]
        column: Column = {
            "ttft": self.ttft_s,
            "tpot": self.tpot_s,
            "e2e": self.e2e_s,
            "stall": np.where(self.output_tokens > 1, self.stall_s, np.nan),
        }[name]
        order = np.argsort(self.due_s, kind="stable")
        counts = self.counts if of is None else self.counts & (self.class_of == of)
        kept = column[order][counts[order]]
        return kept[np.isfinite(kept)], None

    def counted_gaps(self) -> Column:
        """Gaps that began while requests that count arrived, shape (g, 3)."""
        due = self.due_s[self.counts]
        starts = self.gaps[:, 2]
        return np.asarray(self.gaps[(starts >= due.min()) & (starts <= due.max())])


def _statistics(values: Column, weights: Column | None) -> dict[str, BatchMeansInterval]:
    found = {"mean": mean_interval(values, weights)}
    for name, share in LEVELS.items():
        found[name] = quantile_interval(values, share, weights)
    return found


def simulate_system(  # noqa: PLR0913  (what a run is made of)
    system: System,
    arrivals: Arrivals,
    *,
    seed: int,
    decoding: Decoding | None = None,
    progress: Callable[[int], None] | None = None,
    samples: int = SAMPLES,
    gaps: bool = True,
) -> Outcome:
    """
    Simulate *arrivals* on *system* (docs/model.md, eq. Q5).

    Args:
        seed: seed of the routing; equal arguments give equal outcomes.
        decoding: sequences that decode at the begin; `None`: the system is empty.
        progress: called at each sample with the number of requests that have arrived.
        samples: most samples of queues and caches, of which `Outcome.occupancy` is made.
        gaps: whether gaps between tokens are noted; without them the outcome has no ITL.

    Raises:
        InputError: no requests, one without tokens, or one that fits no replica.
        NegativeAnswer: requests preempt one another without end.
    """
    _check(system, arrivals)
    run = EventLoop(system, arrivals, seed=seed, decoding=decoding, gaps=gaps)
    collecting = gc.isenabled()
    gc.disable()  # a run makes millions of tuples and no cycle: the collector takes 14 % of it
    try:
        run.run(progress, samples=samples)
    finally:
        if collecting:
            gc.enable()
    return _outcome(system, run, arrivals.class_of, seed)


def _check(system: System, arrivals: Arrivals) -> None:
    if not len(arrivals):
        raise InputError("requests", 0, "at least one")
    for name, tokens in (("input", arrivals.input_tokens), ("output", arrivals.output_tokens)):
        if tokens.min() < 1:
            at = int(tokens.argmin())
            raise InputError(f"request {at}: {name}_tokens", int(tokens[at]), "at least 1")
    limits = system.decode.limits
    ahead = limits.options.speculative_tokens + limits.lookahead_tokens
    if system.decode.lora is not None and arrivals.adapter is None:
        raise InputError("requests", "without adapters", "an adapter of each: the plan has slots")
    longest = arrivals.input_tokens + arrivals.output_tokens - 1 + ahead
    longest_fit = limits.max_tokens
    pools = [("KV cache of a decode replica", longest, longest_fit)]
    if system.prefill is not None:
        longest_fit = system.prefill.limits.max_tokens
        pools.append(("KV cache of a prefill replica", arrivals.input_tokens, longest_fit))
    for name, tokens, most in pools:
        if tokens.max() > most:
            at = int(tokens.argmax())
            raise InputError(
                f"request {at}", f"{int(tokens[at]):,} tokens", f"at most {most:,}: {name}"
            )


def _outcome(
    system: System, run: EventLoop, class_of: NDArray[np.int64] | None, seed: int
) -> Outcome:
    requests, own = run.requests, slice(run.num_arrivals)
    due, outputs = np.array(run.due_s[own]), np.array(requests.max_tokens[own])
    late_s = _late_s(system, len(due), seed)
    first, finish = requests.first_token_s[own] + late_s, requests.finished_s[own] + late_s
    gaps = np.fromiter(chain.from_iterable(replica.gaps for replica in run.decode), float)
    gaps = gaps.reshape(-1, 3)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(outputs > 1, (finish - first) / (outputs - 1), np.nan)
    counts, settled = _counted(due, first - due, finish - due, tpot)
    span_s = float(finish.max() - due.min())
    pools = {"decode": run.decode, "prefill": run.prefill}
    specs = {"decode": system.decode, "prefill": system.prefill}
    if system.prefill is None:
        pools, specs = {"mixed": run.decode}, {"mixed": system.decode}
    return Outcome(
        due_s=due,
        ttft_s=first - due,
        tpot_s=tpot,
        e2e_s=finish - due,
        stall_s=np.array(requests.stall_s[own]),
        class_of=np.zeros(len(due), dtype=np.int64) if class_of is None else class_of,
        parts_s=_parts(system, run, due, late_s),
        input_tokens=np.array(requests.num_prompt_tokens[own]),
        output_tokens=outputs,
        cached_tokens=np.array(requests.num_cached_tokens[own]),
        preemptions=np.array(requests.num_preemptions[own]),
        prefill_of=np.array(run.prefill_of[own]),
        decode_of=np.array(run.decode_of[own]),
        gaps=gaps[np.argsort(gaps[:, 2], kind="stable")],
        counts=counts,
        settled=settled,
        busy_fraction={
            role: sum(each.busy_s for each in pool) / len(pool) / span_s
            for role, pool in pools.items()
        },
        kv_capacity_blocks={
            role: spec.replicas * spec.limits.kv_blocks
            for role, spec in specs.items()
            if spec is not None
        },
        occupancy=_occupancy(run, tuple(pools)),
        host_tokens=np.array(run.offloaded[0][own]),
        disk_tokens=np.array(run.offloaded[1][own]),
        adapter_loads=np.array(run.adapter_loads[own]),
    )


def _late_s(system: System, num: int, seed: int) -> Column:
    """
    Return what each request takes outside the engines beyond the path's constant, shape (num,).

    It is added to what the engines did: answers wait on their way out as requests do on their way
    in, and the order in which engines see requests stays.
    """
    spread_s = system.path.request_spread_s
    if not spread_s:
        return np.zeros(num)
    return np.random.default_rng((seed, num)).exponential(spread_s, num)


def _parts(system: System, run: EventLoop, due: Column, late_s: Column) -> dict[str, Column]:
    """TTFT by phase; phases that a request skips take nothing."""
    own = slice(run.num_arrivals)
    first = np.array(run.requests.first_token_s[own])
    admitted = np.array(run.requests.scheduled_s[own])
    split = np.array(run.prefill_of[own]) >= 0
    prefilled, pull = np.array(run.prefilled_s[own]), np.array(run.pull_s[own])
    pulled = np.array(run.pulled_s[own])
    ends = [
        due + system.path.request_s,
        admitted,
        np.where(split, prefilled, first),
        np.where(split, pull, first),
        np.where(split, pulled, first),
        first,
    ]
    parts, before = {}, due
    for name, end in zip(TTFT_PHASES, ends, strict=True):
        parts[name] = end - before
        before = end
    return parts | {INGRESS: parts[INGRESS] + late_s}


def _counted(
    due: Column, ttft: Column, e2e: Column, tpot: Column
) -> tuple[NDArray[np.bool_], bool]:
    order = np.argsort(due, kind="stable")
    columns = [ttft[order], e2e[order]]
    if np.isfinite(tpot).all():
        columns.append(tpot[order])
    cuts = [mser5(column) for column in columns]
    start = max(cut for cut, _ in cuts)
    last_s = due.max() - float(np.quantile(e2e, DRAIN))
    counts = np.zeros(len(due), dtype=np.bool_)
    counts[order[start:]] = True
    settled = all(ok for _, ok in cuts)
    inside = counts & (due <= last_s)
    if inside.sum() * 2 < counts.sum():
        return counts, False  # too short to distinguish its end
    return inside, settled


def _occupancy(run: EventLoop, roles: tuple[str, ...]) -> Occupancy:
    samples = np.array([pools[: len(roles)] for _, pools in run.samples], dtype=np.float64)
    columns = [{role: samples[:, at, which] for at, role in enumerate(roles)} for which in range(3)]
    return Occupancy(
        time_s=np.array([time_s for time_s, _ in run.samples]),
        waiting=columns[0],
        running=columns[1],
        kv_blocks=columns[2],
    )
