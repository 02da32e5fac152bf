"""The verdict: what was measured, against the SLO and against the plan."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from loadtest.run.client_health import Health, health
from loadtest.run.metadata import RunMetadata, setting_of
from loadtest.verdict.decision import decide
from loadtest.verdict.prediction import Comparison, compare, compare_replayed
from loadtest.verdict.slo import SloResult, count_good, judge
from loadtest.verdict.stall import Stalls, find_stalls
from loadtest.verdict.utilisation import PoolLoad, pool_loads
from loadtest.verdict.window import evidence_of
from minicluster.errors import Exit
from minicluster.stats.quantiles import LatencySummary, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.run.folder import Run
    from loadtest.verdict.resimulation import Resimulation
    from loadtest.verdict.window import MeasurementWindow
    from minicluster.workload.samples import Sample

SCHEMA_VERSION = 2
"""2: intervals, attainment, phases, replayed predictions (docs/loadtest.md)."""
VERDICTS = {
    "met": Exit.DONE,
    "missed": Exit.NEGATIVE,
    "inconclusive": Exit.INCONCLUSIVE,
    "invalid": Exit.INCONCLUSIVE,
    "failed": Exit.TARGET_FAILED,
    "interrupted": Exit.INTERRUPTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """
    Of the requests that arrived in the window, per second of it; good: met every limit.

    Attributes:
        good_fraction: share of all of them that met every limit (SLO attainment).
        predicted_output_tokens_per_s: what the simulator finishes in the window; `None`: no replay.
        finished_output_tokens_per_s: what was finished in it, whenever it arrived.
    """

    offered_requests_per_s: float
    answered_requests_per_s: float
    good_requests_per_s: float
    good_fraction: float
    output_tokens_per_s: float
    finished_output_tokens_per_s: float
    predicted_output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The part of the run that counts, after MSER-5 has cut what had not settled."""

    start_s: float
    length_s: float
    settled: bool
    cached_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """
    The whole answer; `verdict.json` holds exactly this.

    Attributes:
        verdict: a key of `VERDICTS`.
        reasons: why, in sentences.
        latency: by metric, over answered requests of the window; failures are in `outcomes`
            and in the promises, never in these.
        outcomes: requests of the window by how they ended, `not_sent` among them.
        window: the part of the run that counts.
        notes: what a reader of the numbers has to know.
    """

    schema_version: int
    verdict: str
    exit_code: int
    reasons: tuple[str, ...]
    promises: tuple[SloResult, ...]
    latency: dict[str, LatencySummary | None]
    comparison: Comparison | None
    pools: tuple[PoolLoad, ...]
    stalls: Stalls
    outcomes: dict[str, int]
    throughput: Throughput
    client: Health
    window: Counted
    notes: tuple[str, ...]
    setting: RunMetadata

    @property
    def exit(self) -> Exit:
        """Exit code of the command."""
        return Exit(self.exit_code)


def conclude(
    run: Run,
    tolerance: dict[str, float],
    *,
    require_prediction: bool,
    replay: Resimulation | None = None,
) -> Verdict:
    """
    Judge *run*.

    Args:
        run: as it lies in its folder.
        tolerance: by metric, the error of the predicted mean that is allowed.
        require_prediction: a larger one is a miss.
        replay: the prediction for the run's own requests; without it the plan's own is compared.
    """
    evidence = evidence_of(run)
    answered = evidence.answered
    latency = latencies(answered)
    own = health(run.client, evidence.sent, run.job.slo)
    promises = judge(run.job.slo, evidence.requests)
    comparison = _comparison(run, replay, answered, latency, tolerance)
    verdict, reasons = decide(run, evidence, promises, own)
    code = VERDICTS[verdict]
    if verdict == "met" and require_prediction and not (comparison and comparison.held):
        code = Exit.NEGATIVE
        reasons = (*reasons, "the prediction did not hold, and --require-prediction was given")
    return Verdict(
        schema_version=SCHEMA_VERSION,
        verdict=verdict,
        exit_code=int(code),
        reasons=reasons,
        promises=promises,
        latency=latency,
        comparison=comparison,
        pools=pool_loads(run.plan, run.samples, run.job.window) if run.plan else (),
        stalls=find_stalls(evidence.sent),
        outcomes=_outcomes(evidence),
        throughput=_throughput(run, evidence, replay),
        client=own,
        window=Counted(
            start_s=evidence.settling.start_s,
            length_s=evidence.length_s,
            settled=evidence.settling.settled,
            cached_fraction=evidence.cached_fraction,
        ),
        notes=_notes(run, evidence),
        setting=setting_of(run.job, run.client),
    )


def _comparison(
    run: Run,
    replay: Resimulation | None,
    answered: Sequence[Sample],
    latency: dict[str, LatencySummary | None],
    tolerance: dict[str, float],
) -> Comparison | None:
    if run.plan is None:
        return None
    replayed = compare_replayed(replay, answered, tolerance) if replay else None
    return replayed or compare(run.plan.prediction, latency, tolerance)


def latencies(answered: Sequence[Sample]) -> dict[str, LatencySummary | None]:
    """Summarise every latency of docs/model.md over the requests answered."""
    return {
        "ttft": spread([s.ttft_s for s in answered]),
        "ttft_from_send": spread([s.ttft_send_s for s in answered]),
        "tpot": spread([s.tpot_s for s in answered if s.tpot_s is not None]),
        "itl": spread([gap for s in answered for gap in s.gaps_s]),
        "longest_stall": spread([s.longest_stall_s for s in answered]),
        "e2e": spread([s.e2e_s for s in answered]),
    }


def _outcomes(evidence: MeasurementWindow) -> dict[str, int]:
    counted = Counter(s.outcome for s in evidence.sent)
    not_sent = len(evidence.requests) - len(evidence.sent)
    return dict(counted) | ({"not_sent": not_sent} if not_sent else {})


def _throughput(run: Run, evidence: MeasurementWindow, replay: Resimulation | None) -> Throughput:
    window_s, scheduled, answered = evidence.length_s, len(evidence.requests), evidence.answered
    good = count_good(run.job.slo, answered)
    end_s = evidence.settling.start_s + window_s
    done = [(s.chunk_s[-1], s.output_tokens or 0) for s in run.samples if s.ok]
    foretold = []
    if replay:
        foretold = [
            (s.due_s + replay.requests[s.index].e2e_s, s.asked_output_tokens)
            for s in run.samples
            if s.index in replay.requests
        ]

    def finished(ends: list[tuple[float, int]]) -> float:
        return sum(n for at_s, n in ends if evidence.settling.start_s <= at_s < end_s) / window_s

    return Throughput(
        offered_requests_per_s=scheduled / window_s,
        answered_requests_per_s=len(answered) / window_s,
        good_requests_per_s=good / window_s,
        good_fraction=good / scheduled if scheduled else 0.0,
        output_tokens_per_s=sum(s.output_tokens or 0 for s in answered) / window_s,
        finished_output_tokens_per_s=finished(done),
        predicted_output_tokens_per_s=finished(foretold) if replay else None,
    )


def _notes(run: Run, evidence: MeasurementWindow) -> tuple[str, ...]:
    answered, notes = evidence.answered, []
    num_unanswered = len(evidence.requests) - len(answered)
    if evidence.settling.start_s > run.job.window.start_s:
        cut_s = evidence.settling.start_s - run.job.window.start_s
        notes.append(f"{cut_s:.1f} s more of warm-up were cut: latencies settled only then")
    if num_unanswered and answered:
        notes.append(
            f"the table shows the {len(answered)} requests answered; the SLO is judged on all, "
            f"and the {num_unanswered} without a complete answer count as endless"
        )
    untold = sum(not s.chunk_tokens for s in answered)
    if untold:
        notes.append(
            f"{untold} streams carry no running token total: their first chunk counts as one token"
        )
    chunks = sum(len(s.chunk_tokens) for s in answered)
    merged = sum(tokens > 1 for s in answered for tokens in s.chunk_tokens)
    if merged:
        notes.append(f"{merged / chunks:.1%} of the chunks carried several tokens")
    if answered and evidence.cached_fraction is None:
        notes.append("the endpoint does not tell what its prefix cache held")
    return tuple(notes)


def to_json(verdict: Verdict) -> str:
    """Write *verdict* as JSON."""
    return json.dumps(asdict(verdict), indent=2, allow_nan=False) + "\n"
