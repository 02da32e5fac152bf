"""The verdict: the measurement against the SLO and against the prediction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadtest.run.client_health import Health, health
from loadtest.verdict.decision import decide, lengths_text
from loadtest.verdict.prediction import Comparison, compare, compare_resimulated
from loadtest.verdict.slo import SloResult, good, judge, undecided
from loadtest.verdict.window import CountedPart, MeasurementWindow, measurement_window
from minicluster.errors import Exit
from minicluster.specs.slo import strictest
from minicluster.stats.quantiles import LatencySummary, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.run.folder import Run
    from loadtest.run.schedule import Window
    from loadtest.verdict.resimulation import Resimulation
    from minicluster.plan import Plan
    from minicluster.workload.samples import Sample

SCHEMA_VERSION = 4
"""Version of `verdict.json`; 4 names phases as plans do, and has pools as simulated."""
VERDICTS = {
    "met": Exit.DONE,
    "missed": Exit.NEGATIVE,
    "inconclusive": Exit.INCONCLUSIVE,
    "invalid": Exit.INCONCLUSIVE,
    "failed": Exit.TARGET_FAILED,
    "interrupted": Exit.INTERRUPTED,
}
PROVES_NOTHING = {"invalid", "failed", "interrupted"}
HOLDS = {"met": True, "missed": False}  # the SLO held or not, by verdict; other verdicts do not say
Times = tuple[float, float, float]  # of one request: when it comes, its first token and its end

STAYS = {"prefill": (0, 1), "decode": (1, 2), "mixed": (0, 2)}
"""The two of `Times` between which a request is in a pool."""

MIN_STALL_S = 1.0
"""Least TTFT of a suspected stall; a shorter one is ordinary queueing on any endpoint."""

MEDIANS = 5.0  # least TTFT of a suspected stall, as a multiple of the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """
    Requests that arrived in the window, per second; a good one met every limit of the SLO.

    Attributes:
        good_fraction: fraction of all requests that are good (SLO attainment).
        finished_output_tokens_per_s: tokens of requests that finished in the window, whenever
            they arrived; predicted ones likewise. `None`: not simulated.
    """

    offered_requests_per_s: float
    answered_requests_per_s: float
    good_requests_per_s: float
    good_fraction: float
    output_tokens_per_s: float
    finished_output_tokens_per_s: float
    predicted_good_requests_per_s: float | None
    predicted_output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetadata:
    """Endpoint, time, client and versions of a run; *caveats* stand beside its figures."""

    host: str
    model: str
    seed: int
    warmup_s: float
    window_s: float
    started_unix_s: float
    wall_s: float
    machine: str
    versions: dict[str, str]
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """
    The whole answer; `verdict.json` contains exactly this.

    Attributes:
        verdict: a key of `VERDICTS`.
        latency: by metric, over answered requests of the window; failures are in `outcomes`
            and in `slo`, never in these.
        outcomes: number of requests of the window by outcome, `not_sent` among them.
    """

    schema_version: int
    verdict: str
    exit_code: int
    reasons: tuple[str, ...]
    slo: tuple[SloResult, ...]
    latency: dict[str, LatencySummary | None]
    comparison: Comparison | None
    pools: tuple[PoolLoad, ...]
    stalls: Stalls
    outcomes: dict[str, int]
    throughput: Throughput
    client: Health
    window: CountedPart
    notes: tuple[str, ...]
    metadata: RunMetadata

    @property
    def caveat(self) -> str:
        """Caveat printed beside each figure of the run, after a comma; empty without one."""
        return "".join(f", {caveat}" for caveat in self.metadata.caveats)


class Judged(NamedTuple):
    """A run, what of it counts, its simulation and its verdict: what every report is written of."""

    run: Run
    window: MeasurementWindow
    resimulation: Resimulation | None
    verdict: Verdict


def conclude(
    run: Run,
    tolerance: dict[str, float],
    *,
    require_prediction: bool,
    resimulation: Resimulation | None = None,
) -> Judged:
    """
    Judge *run*, once for all who report of it.

    Args:
        tolerance: largest error, by metric, of a predicted mean that counts as correct.
        require_prediction: whether a larger error is a miss.
        resimulation: the prediction for the run's own requests; `None`: the plan's own is compared.
    """
    window = measurement_window(run)
    answered = window.answered
    latency = latencies(answered)
    promises = run.promises
    strict = strictest(promise.slo for promise in promises)
    client = health(run.client, window.sent, strict, queued=run.job.queued_in_client)
    results = tuple(
        replace(result, of=name)
        for name, slo, own in promises
        for result in judge(slo, window.among(own))
    )
    comparison = compare_resimulated(resimulation, answered, tolerance) if resimulation else None
    if run.plan and not comparison:
        comparison = compare(run.plan.prediction, latency, tolerance)
    outcomes = Counter(s.outcome for s in window.sent)
    if not_sent := len(window.requests) - len(window.sent):
        outcomes["not_sent"] = not_sent
    verdict, reasons = decide(run, window, results, client)
    code = VERDICTS[verdict]
    if verdict == "met" and require_prediction and not (comparison and comparison.held):
        code = Exit.NEGATIVE
        reasons = (*reasons, "the prediction did not hold, and --require-prediction was given")
    judged = Verdict(
        schema_version=SCHEMA_VERSION,
        verdict=verdict,
        exit_code=int(code),
        reasons=reasons,
        slo=results,
        latency=latency,
        comparison=comparison,
        pools=pool_loads(run.plan, run.samples, run.job.window, resimulation) if run.plan else (),
        stalls=find_stalls(window.sent),
        outcomes=dict(outcomes),
        throughput=_throughput(run, window, resimulation),
        client=client,
        window=window.counted,
        notes=_notes(run, window, resimulation),
        metadata=RunMetadata(
            host=run.job.host,
            model=run.job.model,
            seed=run.job.seed,
            warmup_s=run.job.window.start_s,
            window_s=run.job.window.length_s,
            started_unix_s=run.client.started_unix_s,
            wall_s=run.client.wall_s,
            machine=run.client.machine,
            versions=run.client.versions,
            caveats=run.job.caveats,
        ),
    )
    return Judged(run, window, resimulation, judged)


def latencies(answered: Sequence[Sample]) -> dict[str, LatencySummary | None]:
    """Summarise every latency of docs/model.md over the requests answered."""
    return {
        "ttft": summarise([s.ttft_s for s in answered]),
        "ttft_from_send": summarise([s.ttft_send_s for s in answered]),
        "tpot": summarise([s.tpot_s for s in answered if s.tpot_s is not None]),
        "itl": summarise([gap for s in answered for gap in s.gaps_s]),
        "longest_stall": summarise([s.longest_stall_s for s in answered]),
        "e2e": summarise([s.e2e_s for s in answered]),
    }


def num_undecided(run: Run, window: MeasurementWindow) -> int:
    """Return the requests in flight at the end of a run cut short, within every limit so far."""
    return sum(undecided(slo, s) for _, slo, own in run.promises for s in window.among(own))


def _simulated_tokens(run: Run, sample: Sample) -> int:
    counted = sample.output_tokens if run.job.plain and sample.ok else None
    return counted or sample.asked_output_tokens


def _throughput(
    run: Run, window: MeasurementWindow, resimulation: Resimulation | None
) -> Throughput:
    start_s, window_s = window.counted.start_s, window.counted.length_s
    scheduled, answered = len(window.requests), window.answered
    num_good = len(good(run.promises, {s.index: s for s in answered}))
    decided = scheduled - num_undecided(run, window)
    done = [(s.chunk_s[-1], s.output_tokens or 0) for s in run.samples if s.ok]
    predicted_requests = resimulation.requests if resimulation else {}
    predicted = [
        (s.due_s + predicted_requests[s.index].e2e_s, _simulated_tokens(run, s))
        for s in run.samples
        if s.index in predicted_requests
    ]
    simulated = {
        s.index: predicted_requests[s.index] for s in window.sent if s.index in predicted_requests
    }

    def finished(ends: list[tuple[float, int]]) -> float:
        return sum(n for at_s, n in ends if start_s <= at_s < start_s + window_s) / window_s

    return Throughput(
        offered_requests_per_s=scheduled / window_s,
        answered_requests_per_s=len(answered) / window_s,
        good_requests_per_s=num_good / window_s,
        good_fraction=num_good / decided if decided else 0.0,
        output_tokens_per_s=sum(s.output_tokens or 0 for s in answered) / window_s,
        finished_output_tokens_per_s=finished(done),
        predicted_good_requests_per_s=(
            len(good(run.promises, simulated)) / window_s if resimulation else None
        ),
        predicted_output_tokens_per_s=finished(predicted) if resimulation else None,
    )


def _notes(
    run: Run, window: MeasurementWindow, resimulation: Resimulation | None
) -> tuple[str, ...]:
    answered, notes = window.answered, list(run.job.remarks)
    if run.job.plain:
        notes.append(lengths_text(answered, planned=run.plan is not None))
    if (slowdown := run.job.slowdown) is not None:
        notes.append(
            f"simulated engines, {slowdown:g} times slower: seconds are the plan's, and say what "
            "its model takes, not what a GPU does"
        )
    num_open = num_undecided(run, window)
    num_unanswered = len(window.requests) - len(answered) - num_open
    if num_open:
        notes.append(
            f"{num_open} requests were in flight at the end and within their limits so far: "
            "neither met nor missed"
        )
    if (cut_s := window.counted.start_s - run.job.window.start_s) > 0:
        notes.append(f"the warm-up was extended by {cut_s:.1f} s, until latencies had settled")
    if num_unanswered and answered:
        notes.append(
            f"the table covers the {len(answered)} answered requests; the SLO is judged on all, "
            f"and the {num_unanswered} without a complete answer count as infinitely late"
        )
    notes += _stream_notes(window)
    num_away, num_sent = sum(s.turned_away for s in run.samples), len(run.samples)
    if resimulation and num_away:
        notes.append(
            f"{num_away:,} of {num_sent:,} requests sent ({num_away / num_sent:.0%}) were turned "
            "away before they reached an engine; the prediction is of the others"
        )
    return tuple(notes)


def _stream_notes(window: MeasurementWindow) -> list[str]:
    """Say what the answers do not tell of their tokens."""
    answered, notes = window.answered, []
    uncounted = sum(not s.chunk_tokens for s in answered)
    if uncounted:
        notes.append(
            f"{uncounted} streams carry no running token total, so that their first chunk counts "
            "as one token"
        )
    chunks = sum(len(s.chunk_tokens) for s in answered)
    merged = sum(tokens > 1 for s in answered for tokens in s.chunk_tokens)
    if merged:
        notes.append(f"{merged / chunks:.1%} of the chunks carried several tokens")
    if answered and window.counted.cached_fraction is None:
        notes.append("the endpoint does not report the hits of its prefix cache")
    return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """
    Load of one pool.

    Attributes:
        predicted_utilisation_fraction: mean share of the run in which a replica computes, as
            simulated; without a simulation the plan's, at its own load. No client can see it.
        predicted_concurrent, measured_concurrent: mean number of requests in the pool over the
            window; without a simulation the former by Little's law at the plan's load.
    """

    role: str
    replicas: int
    predicted_utilisation_fraction: float | None
    predicted_concurrent: float
    measured_concurrent: float


def pool_loads(
    plan: Plan, samples: Sequence[Sample], window: Window, resimulation: Resimulation | None
) -> tuple[PoolLoad, ...]:
    """
    Return the load of each pool of the plan.

    Ignores: The phases before the first token: the client cannot separate prefill's queue, prefill
    and KV transfer, so all of them count for the prefill pool, measured and predicted.
    """
    utilisation = (
        resimulation.busy_fraction if resimulation else plan.prediction.utilisation_fraction
    )
    measured = [(s.send_s, s.chunk_s[0] if s.chunk_s else s.end_s, s.end_s) for s in samples]
    seen = _mean_concurrent(measured, window)
    if resimulation:
        predicted_of = [(s.due_s, resimulation.requests.get(s.index)) for s in samples]
        simulated = [(due_s, due_s + r.ttft_s, due_s + r.e2e_s) for due_s, r in predicted_of if r]
        predicted = _mean_concurrent(simulated, window)
    else:
        rate, planned = plan.workload.requests_per_s, plan.prediction
        times = (0.0, planned.ttft.mean_s, planned.e2e.mean_s)
        predicted = {role: rate * (times[end] - times[at]) for role, (at, end) in STAYS.items()}
    return tuple(
        PoolLoad(
            role=pool.role,
            replicas=pool.replicas,
            predicted_utilisation_fraction=utilisation.get(pool.role),
            predicted_concurrent=predicted[pool.role],
            measured_concurrent=seen[pool.role],
        )
        for pool in plan.pools
    )


def _mean_concurrent(times: Sequence[Times], window: Window) -> dict[str, float]:
    def inside_s(at: Times, start: int, end: int) -> float:
        return max(0.0, min(at[end], window.end_s) - max(at[start], window.start_s))

    return {
        role: sum(inside_s(at, start, end) for at in times) / window.length_s
        for role, (start, end) in STAYS.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Indices of the requests with a suspected stall, and the TTFT threshold used."""

    threshold_s: float
    indices: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of suspected stalls."""
        return len(self.indices)


def find_stalls(samples: Sequence[Sample]) -> Stalls:
    """
    Find requests whose first token took long although no queue explains it.

    Long means a TTFT from send above 1 s and above five times the median. No queue explains it if
    no other request waited meanwhile, or if one that was sent later, and was not long itself,
    overtook it. A queue delays neighbouring requests and is first come, first served; a stalled
    transfer delays one request alone.

    Ignores: Replicas with queues of different lengths, where overtaking is natural: with both
    thresholds that long it is rare, and the count says "suspected".
    """
    if not samples:
        return Stalls(threshold_s=MIN_STALL_S, indices=())
    send = np.array([s.send_s for s in samples])
    first = np.array([s.chunk_s[0] if s.chunk_s else s.end_s for s in samples])
    ttft = first - send
    threshold_s = max(MIN_STALL_S, MEDIANS * float(np.median(ttft)))
    long = ttft > threshold_s
    # A refused connection or a bad status ended the wait; it did not stall.
    waited = np.array([bool(s.chunk_s) or s.outcome in {"timeout", "unfinished"} for s in samples])
    stalled = []
    for i in np.flatnonzero(long & waited):
        others = (send < first[i]) & (first > send[i])
        others[i] = False
        overtaken = others & (send > send[i]) & (first < first[i]) & ~long
        if overtaken.any() or not others.any():
            stalled.append(samples[i].index)
    return Stalls(threshold_s=threshold_s, indices=tuple(stalled))
