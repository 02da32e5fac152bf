"""The verdict: what was measured, against the SLO and against the plan."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from loadtest.client import Health, health
from loadtest.comparison import Comparison, compare
from loadtest.decision import decide
from loadtest.load import PoolLoad, pool_loads
from loadtest.promise import Promise, count_good, judge
from loadtest.setting import Setting, setting_of
from loadtest.spread import Spread, spread
from loadtest.stall import Stalls, find_stalls
from sizing.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.run import Run
    from loadtest.samples import Sample

SCHEMA_VERSION = 1
VERDICTS = {
    "met": Exit.DONE,
    "missed": Exit.NEGATIVE,
    "inconclusive": Exit.INCONCLUSIVE,
    "failed": Exit.TARGET_FAILED,
    "interrupted": Exit.INTERRUPTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Of the requests that arrived in the window, per second of it; good: met every limit."""

    offered_requests_per_s: float
    answered_requests_per_s: float
    good_requests_per_s: float
    output_tokens_per_s: float


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
        notes: what a reader of the numbers has to know.
    """

    schema_version: int
    verdict: str
    exit_code: int
    reasons: tuple[str, ...]
    promises: tuple[Promise, ...]
    latency: dict[str, Spread | None]
    comparison: Comparison | None
    pools: tuple[PoolLoad, ...]
    stalls: Stalls
    outcomes: dict[str, int]
    throughput: Throughput
    client: Health
    notes: tuple[str, ...]
    setting: Setting

    @property
    def exit(self) -> Exit:
        """Exit code of the command."""
        return Exit(self.exit_code)


def conclude(run: Run, tolerance: dict[str, float], *, require_prediction: bool) -> Verdict:
    """Judge *run*; a prediction missed by more than *tolerance* is a miss if it is required."""
    measured = run.measured
    answered = [s for s in measured if s.ok]
    scheduled = sum(r.in_window for r in run.schedule)
    latency = latencies(answered)
    own = health(run.client, measured, run.job.slo)
    promises = judge(run.job.slo, answered, scheduled - len(answered))
    comparison = compare(run.plan.prediction, latency, tolerance) if run.plan else None
    verdict, reasons = decide(run, promises, own)
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
        stalls=find_stalls(measured),
        outcomes=_outcomes(measured, scheduled),
        throughput=_throughput(run, answered, scheduled),
        client=own,
        notes=_notes(answered, scheduled - len(answered)),
        setting=setting_of(run.job, run.client),
    )


def latencies(answered: Sequence[Sample]) -> dict[str, Spread | None]:
    """Summarise every latency of docs/model.md over the requests answered."""
    return {
        "ttft": spread([s.ttft_s for s in answered]),
        "ttft_from_send": spread([s.ttft_send_s for s in answered]),
        "tpot": spread([s.tpot_s for s in answered if s.tpot_s is not None]),
        "itl": spread([gap for s in answered for gap in s.gaps_s]),
        "longest_stall": spread([max(s.gaps_s, default=0.0) for s in answered]),
        "e2e": spread([s.e2e_s for s in answered]),
    }


def _outcomes(measured: Sequence[Sample], scheduled: int) -> dict[str, int]:
    counted = Counter(s.outcome for s in measured)
    not_sent = scheduled - len(measured)
    return dict(counted) | ({"not_sent": not_sent} if not_sent else {})


def _throughput(run: Run, answered: Sequence[Sample], scheduled: int) -> Throughput:
    window_s = run.job.window.length_s
    return Throughput(
        offered_requests_per_s=scheduled / window_s,
        answered_requests_per_s=len(answered) / window_s,
        good_requests_per_s=count_good(run.job.slo, answered) / window_s,
        output_tokens_per_s=sum(s.output_tokens or 0 for s in answered) / window_s,
    )


def _notes(answered: Sequence[Sample], num_unanswered: int) -> tuple[str, ...]:
    notes = []
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
    return tuple(notes)


def to_json(verdict: Verdict) -> str:
    """Write *verdict* as JSON."""
    return json.dumps(asdict(verdict), indent=2, allow_nan=False) + "\n"
