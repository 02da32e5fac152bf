"""The page of a run: verdict, charts, errors, plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING

from loadtest.report.charts import goodput_against_load, requests_over_time
from loadtest.report.table import (
    LATENCY_HEADS,
    client_text,
    filled_columns,
    headline,
    interval_text,
    latency_rows,
    latency_text,
    load_rows,
    outcome_text,
    pace_text,
    phases_text,
    prediction_text,
    stall_text,
)
from loadtest.verdict.verdict import HOLDS, Judged, Verdict
from minicluster.pages.figure import BLUE, ORANGE, Figure
from minicluster.pages.latency import LatencyCurve, latency_distribution
from minicluster.pages.page import ChartRow, DataTable, FactTable, Page, Section, Text, Tile
from minicluster.phases import label
from minicluster.stats.shares import LEVELS
from minicluster.units import seconds, signed_seconds
from minicluster.workload.samples import OUTCOMES, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from loadtest.run.folder import Run
    from loadtest.run.job import Job
    from loadtest.verdict.resimulation import PredictedRequest
    from loadtest.verdict.slo import SloResult
    from minicluster.plan import Plan

MOST_ERRORS = 8  # number of kinds of errors listed
MOST_DETAIL = 160  # characters shown of the endpoint's text of an error

DEFINITIONS = (
    "TTFT: scheduled arrival to first content chunk. TPOT: (last - first chunk) / (tokens after the"
    " first chunk). ITL: gaps between content chunks. E2E: scheduled arrival to last token."
    " Requests without a complete answer miss the SLO and are in no average."
)
CHARTED = ("ttft", "tpot")


def run_page(judged: Judged) -> Page:
    """Return the whole page of a run."""
    run, verdict = judged.run, judged.verdict
    word, _ = headline(verdict)
    lines = [*_reasons(verdict), pace_text(verdict) or "", prediction_text(verdict) or ""]
    parts: list[Section | ChartRow] = [
        _latencies(verdict),
        *_phases(verdict),
        *_charts(judged),
        *_errors(run),
    ]
    if run.plan:
        planned = FactTable(tuple(_plan_facts(run.plan)))
        parts.append(Section("The plan", (planned,), folded=True))
    parts.append(Section("The run", (FactTable(tuple(_run_facts(run, verdict))),), folded=True))
    return Page(
        title=f"{word}: {verdict.metadata.model}",
        headline=word,
        status=verdict.verdict,
        lines=tuple(map(sentence, filter(None, lines))),
        notes=tuple(map(sentence, (outcome_text(verdict), *verdict.notes))),
        tiles=tuple(_tiles(verdict)),
        parts=tuple(parts),
        footer=footer(),
    )


def _reasons(verdict: Verdict) -> Iterator[str]:
    """Yield what decided the verdict, and each limit in counts of requests and what it lacks."""
    limits = verdict.slo
    lacks = {limit.attained_text: "" for limit in limits}
    for reason in verdict.reasons:
        judged = next((text for text in lacks if reason.startswith(text)), "")
        if judged:
            lacks[judged] = reason.removeprefix(judged)
        else:
            yield f"{reason}{verdict.caveat}"
    for limit in limits:
        kind = "gaps" if limit.metric == "itl" else "requests"
        kept = f"{limit.num - limit.num_missed:,} of {limit.num:,}"
        within = f"{kept} {kind} within {seconds(limit.limit_s)}"
        yield f"{limit.name}: {within}{lacks[limit.attained_text]}{verdict.caveat}"


def footer() -> str:
    """Say which program wrote a page."""
    return f"minicluster {metadata.version('minicluster')}, loadtest"


def sentence(text: str) -> str:
    """Begin *text* with a capital letter, unless with an address; no line breaks before its %."""
    address = "://" in text.partition(" ")[0]
    begun = text if address else text[:1].upper() + text[1:]
    return begun.replace(" %", "\N{NO-BREAK SPACE}%")


def _tiles(verdict: Verdict) -> Iterator[Tile]:
    for result in verdict.slo:
        yield Tile(
            name=result.name,
            value=latency_text(result.measured_s),
            below=f"SLO {seconds(result.limit_s)}, 95 % interval {interval_text(result)}"
            f"{verdict.caveat}",
            bad=result.verdict == "missed",
        )
    done = verdict.throughput
    yield Tile(
        name="goodput",
        value=f"{done.good_requests_per_s:.2f}/s",
        below=f"{done.good_fraction:.2%} of {done.offered_requests_per_s:.2f} requests/s"
        f"{verdict.caveat}",
    )
    stall = verdict.latency["longest_stall"]
    yield Tile(
        name="longest stall",
        value=seconds(stall.max_s) if stall else "-",
        below=f"{verdict.stalls.count} suspected KV-transfer stalls",
        bad=verdict.stalls.count > 0,
    )


def _latencies(verdict: Verdict) -> Section:
    heads, *rows = filled_columns(LATENCY_HEADS, latency_rows(verdict), load_rows(verdict))
    title = "Measured, SLO" if verdict.comparison is None else "Predicted, measured, SLO"
    return Section(f"{title}{verdict.caveat}", (DataTable(heads, tuple(rows)),))


def _phases(verdict: Verdict) -> Iterator[Section]:
    phases = verdict.comparison.phases if verdict.comparison else None
    if phases is None:
        return
    rows = tuple(
        (
            label(row.name),
            seconds(row.predicted_s),
            seconds(row.measured_s),
            signed_seconds(row.difference_s),
        )
        for row in phases.rows
    )
    drawn = DataTable(("", "predicted", "measured", "difference"), rows)
    explained = Text(sentence(phases_text(verdict) or ""))
    yield Section("Phase by phase, means", (drawn, explained))


def _errors(run: Run) -> Iterator[Section]:
    seen = Counter(_how_it_ended(s) for s in run.samples if _failed(s))
    if seen:
        rows = tuple((f"{count} x", what) for what, count in seen.most_common(MOST_ERRORS))
        yield Section("Errors", (FactTable(rows),))


def _charts(judged: Judged) -> Iterator[ChartRow]:
    """Draw distribution and course of TTFT and TPOT, where anything was measured, and goodput."""
    run = judged.run
    figures = [
        figure
        for draw in (_distribution, _course)
        for metric in CHARTED
        for figure in draw(metric, judged)
    ]
    if figures:
        yield ChartRow(tuple(figures))
    # A closed loop and a load with stages have no single rate to draw over.
    if run.plan and not (run.job.shape.closed or run.job.shape.stages):
        yield from _goodput(judged.verdict, run.plan)


def _goodput(verdict: Verdict, plan: Plan) -> Iterator[ChartRow]:
    """Draw goodput over load: this run's, as measured and simulated, and the plan's limit."""
    done, held = verdict.throughput, HOLDS.get(verdict.verdict)
    predicted_good = done.predicted_good_requests_per_s
    if predicted_good is None:
        return
    limit = plan.headroom.load_factor * plan.workload.requests_per_s
    points = {0.0: 0.0, limit: LEVELS[plan.slo.percentile] * limit}
    points[done.offered_requests_per_s] = predicted_good
    drawn = goodput_against_load(
        [(done.offered_requests_per_s, done.good_requests_per_s, held)],
        {held: "this run"},
        limits={"predicted limit of the SLO": (limit, ORANGE)},
        predicted=sorted(points.items()),
    )
    caption = (
        f"{drawn.caption}. Predicted: this run's own requests, simulated without admission control,"
        f" and {plan.slo.percentile} of the requests at {limit:.2f} requests/s, up to which the"
        " plan predicts the SLO to hold; beyond, queues grow as long as the load lasts."
    )
    yield ChartRow((replace(drawn, caption=caption),))


def values_s(metric: str, requests: Iterable[Sample | PredictedRequest]) -> list[float]:
    """Return one latency of *requests*, measured or simulated, as far as they have it."""
    return [v for request in requests if (v := getattr(request, f"{metric}_s")) is not None]


def _distribution(metric: str, judged: Judged) -> Iterator[Figure]:
    answered, plan, resimulation = judged.window.answered, judged.run.plan, judged.resimulation
    measured = values_s(metric, answered)
    if not measured:
        return
    predicted_requests = resimulation.requests if resimulation else {}
    simulated = values_s(
        metric, [predicted_requests[s.index] for s in answered if s.index in predicted_requests]
    )
    curves, predicted = [LatencyCurve(name="measured", values_s=measured, colour=BLUE)], None
    if simulated:
        drawn = LatencyCurve(name="predicted", values_s=simulated, colour=ORANGE, dash="dash")
        curves.append(drawn)
    elif plan:
        planned = getattr(plan.prediction, metric)
        predicted = {p: planned.at(n) for n, p in LEVELS.items()}
    limit = _limit(metric, judged.verdict)
    yield latency_distribution(
        f"{metric.upper()}: distribution",
        curves,
        predicted_s=predicted,
        limit=(LEVELS[limit.percentile], limit.limit_s) if limit else None,
    )


def _limit(metric: str, verdict: Verdict) -> SloResult | None:
    return next((r for r in verdict.slo if r.metric == metric and not r.of), None)


def _course(metric: str, judged: Judged) -> Iterator[Figure]:
    run, limit = judged.run, _limit(metric, judged.verdict)
    points = [
        (s.due_s, v) for s in run.samples if s.ok and (v := getattr(s, f"{metric}_s")) is not None
    ]
    if points:
        window = run.job.window
        yield requests_over_time(
            f"{metric.upper()} over time",
            points,
            failed=[(s.due_s, _how_it_ended(s)) for s in run.samples if _failed(s)],
            window_s=(window.start_s, window.end_s),
            limit_s=limit.limit_s if limit else None,
            end_s=max(window.end_s, *(s.due_s for s in run.samples)),
        )


def _how_it_ended(sample: Sample) -> str:
    return f"{OUTCOMES[sample.outcome]}: {(sample.detail or '')[:MOST_DETAIL]}"


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
        limits = f"{pool.max_num_seqs} sequences and {pool.max_num_batched_tokens} tokens a step"
        layout = f"{pool.replicas} x TP {pool.tp}, PP {pool.pp} on {pool.gpu}, {pool.dtype}"
        yield f"{pool.role} pool", f"{layout}; up to {limits}"
    predicted, factor = plan.prediction, plan.headroom.load_factor
    yield "planned load", f"{plan.workload.requests_per_s:g} requests/s"
    yield "predicted capacity", f"{predicted.capacity_requests_per_s:.3g} requests/s"
    holds = f"SLO predicted to hold up to {factor:.2f} times the load"
    yield "headroom", f"{holds}, then {plan.headroom.binds} binds"
    yield "bottleneck", ", ".join(f"{role}: {what}" for role, what in predicted.bottleneck.items())
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
    window = f"{where.window_s:.1f} s of scheduled arrivals after {where.warmup_s:.1f} s of warm-up"
    yield "window", f"{window}; arrivals went on until its last request had ended"
    yield "arrivals", f"{arrivals_text(run.job)}, seed {where.seed}"
    yield "requests", "chats" if run.job.chat else "completions of token ids"
    for problem in (client_text(verdict), stall_text(verdict)):
        name, _, text = problem.partition(": ")
        yield name, text
    yield "client machine", where.machine
    yield "versions", ", ".join(f"{name} {version}" for name, version in where.versions.items())
    yield "statistics", "\n".join(limit.attained_text for limit in verdict.slo)
    yield "definitions", DEFINITIONS
