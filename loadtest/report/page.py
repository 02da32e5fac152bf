"""The verdict as one self-contained HTML page: nothing is loaded from anywhere."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from loadtest.report.chart import FOUND, distribution, goodput, over_time
from loadtest.report.html import document, escape, facts, legend, paragraph, section, table
from loadtest.report.table import (
    client_text,
    confidence_text,
    headline,
    interval_text,
    latency_rows,
    load_rows,
    outcome_text,
    phases_text,
    prediction_text,
    stall_text,
)
from minicluster.stats.quantiles import LEVELS
from minicluster.units import seconds
from minicluster.workload.samples import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.run.folder import Run
    from loadtest.run.job import Job
    from loadtest.verdict.goodput_curve import GoodputCurve
    from loadtest.verdict.resimulation import Resimulation
    from loadtest.verdict.slo import SloResult
    from loadtest.verdict.verdict import Verdict
    from minicluster.plan import Plan
    from minicluster.workload.samples import Sample

MOST_ERRORS = 8
"""Kinds of errors listed."""

NAMES = {"ttft": "TTFT", "tpot": "TPOT"}
HELD = {"met": True, "missed": False}
"""Whether the SLO held, by verdict; of others nobody knows."""


def page(
    run: Run,
    verdict: Verdict,
    replay: Resimulation | None = None,
    foreseen: GoodputCurve | None = None,
) -> str:
    """Draw the whole page."""
    word, _ = headline(verdict)
    body = [
        _header(verdict),
        section("Predicted, measured, promised", _latency_table(verdict)),
        _phases(verdict),
        _charts(run, verdict, replay, foreseen),
        _errors(run),
    ]
    if run.plan:
        body.append(section("The plan", facts(_plan_facts(run.plan))))
    body.append(section("The run", facts(_run_facts(run, verdict))))
    return document(f"{word}: {verdict.metadata.model}", *body)


def _header(verdict: Verdict) -> str:
    word, why = headline(verdict)
    lines = [paragraph(why)]
    if said := prediction_text(verdict):
        lines.append(paragraph(said))
    lines += [paragraph(confidence_text(promise)) for promise in verdict.slo]
    lines += [paragraph(note, "soft") for note in (outcome_text(verdict), *verdict.notes)]
    return (
        f'<header class="{escape(verdict.verdict)}"><h1>{escape(word)}</h1>{"".join(lines)}'
        f'<div class="tiles">{"".join(_tiles(verdict))}</div></header>'
    )


def _tiles(verdict: Verdict) -> Iterator[str]:
    for promise in verdict.slo:
        measured = promise.measured_s
        yield _tile(
            f"{promise.metric.upper()} {promise.percentile}",
            "endless" if measured is None else seconds(measured),
            f"SLO {seconds(promise.limit_s)}, 95 % interval {interval_text(promise)}",
            bad=promise.verdict == "missed",
        )
    done = verdict.throughput
    yield _tile(
        "goodput",
        f"{done.good_requests_per_s:.2f}/s",
        f"{done.good_fraction:.2%} of {done.offered_requests_per_s:.2f} requests/s",
        bad=False,
    )
    stall = verdict.latency["longest_stall"]
    yield _tile(
        "longest stall",
        seconds(stall.max_s) if stall else "-",
        f"{verdict.stalls.count} suspected KV-transfer stalls",
        bad=verdict.stalls.count > 0,
    )


def _tile(name: str, value: str, below: str, *, bad: bool) -> str:
    mark = ' class="bad"' if bad else ""
    return (
        f'<div class="tile"><span class="soft">{escape(name)}</span><b{mark}>{escape(value)}</b>'
        f'<span class="soft">{escape(below)}</span></div>'
    )


def _latency_table(verdict: Verdict) -> str:
    heads = ("", "predicted", "measured", "error", "SLO")
    return table(heads, (*latency_rows(verdict), *load_rows(verdict)))


def _phases(verdict: Verdict) -> str:
    """Show where predicted and measured time went, where the endpoint tells."""
    phases = verdict.comparison.phases if verdict.comparison else None
    if phases is None:
        return ""
    rows = [
        (
            row.name,
            seconds(row.predicted_s),
            seconds(row.measured_s),
            f"{1000 * row.difference_s:+z.1f} ms",
        )
        for row in phases.rows
    ]
    said = paragraph(phases_text(verdict) or "", "soft")
    drawn = table(("", "predicted", "measured", "difference"), rows)
    return section("Phase by phase, means", drawn + said)


def _errors(run: Run) -> str:
    """List what went wrong, most frequent first."""
    seen = Counter(
        f"{OUTCOMES[s.outcome]}: {(s.detail or '')[:160]}" for s in run.samples if _failed(s)
    )
    if not seen:
        return ""
    rows = [(f"{count} x", what) for what, count in seen.most_common(MOST_ERRORS)]
    return section("Errors", facts(rows))


def _charts(
    run: Run, verdict: Verdict, replay: Resimulation | None, foreseen: GoodputCurve | None
) -> str:
    """Draw distribution and course of TTFT and TPOT, where anything was measured, and goodput."""
    answered = [s for s in run.measured if s.ok and s.due_s >= verdict.window.start_s]
    promises = {p.metric: p for p in verdict.slo}
    drawn = []
    for metric, name in NAMES.items():
        values = [v for s in answered if (v := getattr(s, f"{metric}_s")) is not None]
        if values:
            foretold = _foretold(metric, answered, replay)
            chart = _distribution(metric, values, foretold, promises.get(metric), run.plan)
            marks = {
                "measured": "measured",
                **({"predicted": "predicted"} if run.plan else {}),
                **({"limit": "SLO"} if metric in promises else {}),
            }
            drawn.append(section(f"{name}: distribution", legend(marks) + chart))
    for metric, name in NAMES.items():
        if course := _course(metric, run, promises.get(metric)):
            drawn.append(section(f"{name} over time", course))
    if foreseen:
        drawn.append(_goodput(verdict, foreseen))
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _goodput(verdict: Verdict, foreseen: GoodputCurve) -> str:
    """Draw what of a load meets the SLO: predicted at several, measured at this run's."""
    done, limit = verdict.throughput, foreseen.limit_requests_per_s
    held = HELD.get(verdict.verdict)
    marks = {
        FOUND[held]: "this run",
        "predicted": "predicted",
        "limit-predicted": "the SLO holds up to here, by the plan",
        "ideal": "all that is offered",
    }
    drawn = goodput(
        [(done.offered_requests_per_s, done.good_requests_per_s, held)],
        {"predicted": limit},
        foreseen.points,
    )
    said = (
        f"Predicted: this run's own requests, simulated at other rates without the front door's "
        f"shedding. The plan has the SLO hold up to {limit:.2f} requests/s; beyond, queues grow "
        "as long as the load lasts."
    )
    return section("Goodput against load", legend(marks) + drawn + paragraph(said, "soft"))


def _foretold(metric: str, answered: Sequence[Sample], replay: Resimulation | None) -> list[float]:
    """Return the simulated latency of each request answered."""
    if replay is None:
        return []
    known = [replay.requests[s.index] for s in answered if s.index in replay.requests]
    return [v for each in known if (v := getattr(each, f"{metric}_s")) is not None]


def _distribution(
    metric: str,
    values: Sequence[float],
    foretold: Sequence[float],
    promise: SloResult | None,
    plan: Plan | None,
) -> str:
    predicted = getattr(plan.prediction, metric) if plan else None
    return distribution(
        values,
        foretold_s=foretold,
        predicted_s={p: predicted.at(n) for n, p in LEVELS.items()}
        if predicted and not foretold
        else {},
        limit=(LEVELS[promise.percentile], promise.limit_s) if promise else None,
    )


def _course(metric: str, run: Run, promise: SloResult | None) -> str | None:
    points = [
        (s.due_s, v) for s in run.samples if s.ok and (v := getattr(s, f"{metric}_s")) is not None
    ]
    if not points:
        return None
    window = run.job.window
    failed_s = [s.due_s for s in run.samples if _failed(s)]
    marks = {
        "point": "a request",
        **({"failed": "one that failed"} if failed_s else {}),
        **({"limit": "SLO"} if promise else {}),
    }
    return legend(marks) + over_time(
        points,
        failed_s=failed_s,
        window=(window.start_s, window.end_s),
        limit_s=promise.limit_s if promise else None,
        end_s=max(window.end_s, *(s.due_s for s in run.samples)),
    )


def _failed(sample: Sample) -> bool:
    """Tell whether it failed; what the end of the run cut off behind the window did not."""
    return not sample.ok and (sample.in_window or sample.outcome != "unfinished")


def arrivals_text(job: Job) -> str:
    """Say how requests came."""
    source, shape = job.shape.source, job.shape
    if source.users is not None:
        return f"closed loop of {source.users} users"
    if job.workload.trace:
        return f"trace {job.workload.trace}"
    if shape.stages:
        return f"open loop in {len(shape.stages)} stages, {source.process}"
    return f"open loop, {source.process}, {job.workload.requests_per_s:g}/s"


def _plan_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "model", plan.model.id
    for pool in plan.pools:
        yield (
            f"{pool.role} pool",
            (
                f"{pool.replicas} x TP {pool.tp}, PP {pool.pp} on {pool.gpu}, {pool.dtype}; up to "
                f"{pool.max_batch_size} sequences and {pool.max_batched_tokens} tokens a step"
            ),
        )
    load, promised = plan.workload, plan.prediction
    yield "planned load", f"{load.requests_per_s:g} requests/s"
    yield "predicted capacity", f"{promised.capacity_requests_per_s:.3g} requests/s"
    yield (
        "headroom",
        (
            f"SLO predicted to hold up to {plan.headroom.load_factor:.2f} times the load, "
            f"then {plan.headroom.binds} binds"
        ),
    )
    yield "bottleneck", ", ".join(f"{role}: {what}" for role, what in promised.bottleneck.items())
    note, error = plan.calibration, plan.calibration.error_fraction
    fitted = "" if error is None else f", residual {error:.1%}"
    yield "calibration", f"{note.name}, {note.date}{fitted}"
    yield "validated on", f"{plan.validated_on.num_rows} rows: {plan.validated_on.note}"
    yield "engine", f"{plan.engine.name} {plan.engine.version}"


def _run_facts(run: Run, verdict: Verdict) -> Iterator[tuple[str, str]]:
    where = verdict.metadata
    started = datetime.fromtimestamp(where.started_unix_s, tz=UTC)
    yield "endpoint", f"{where.host}, model {where.model}"
    yield "started", f"{started:%Y-%m-%d %H:%M:%S} UTC, {where.wall_s:.1f} s in all"
    yield (
        "window",
        (
            f"{where.window_s:.1f} s of scheduled arrivals after {where.warmup_s:.1f} s of "
            "warm-up; arrivals went on until its last request had ended"
        ),
    )
    yield "arrivals", f"{arrivals_text(run.job)}, seed {where.seed}"
    yield "requests", "chats" if run.job.chat else "completions of token ids"
    for problem in (client_text(verdict), stall_text(verdict)):
        name, _, text = problem.partition(": ")
        yield name, text
    yield "client machine", where.machine
    yield "versions", ", ".join(f"{name} {version}" for name, version in where.versions.items())
    yield (
        "definitions",
        (
            "TTFT: scheduled arrival to first content chunk. TPOT: (last - first chunk) / (tokens "
            "after the first chunk). ITL: gaps between content chunks. E2E: scheduled arrival to "
            "last token. Requests without a complete answer miss the SLO and are in no average."
        ),
    )
