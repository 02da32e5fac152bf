"""A plan as one self-contained HTML page: nothing is loaded from anywhere."""

from __future__ import annotations

import html
from importlib import resources
from typing import TYPE_CHECKING

from minicluster.units import seconds
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner.evaluated import evaluated
from sizing.planner.studies.answer import figures, layout_of
from sizing.planner.studies.loss import as_confident
from sizing.report.layout_drawing import layout_drawing
from sizing.report.page_charts import fronts_charts, latency_charts, legend, over_time_charts
from sizing.report.page_facts import (
    STATISTICS,
    assumption_rows,
    latency_rows,
    pool_rows,
    source_rows,
)
from sizing.report.tables import free_gpus, kinds_of
from sizing.simulation.planned import simulate_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from minicluster.plan import Plan

REQUESTS = 20_000
SEED = 0


def plan_page(plan: Plan) -> str:
    """
    Simulate a plan, forecast what else there was, and draw it all.

    Raises:
        InputError: a plan that cannot be simulated.
    """
    arrivals = drawn(plan.workload, RequestSource(), count=REQUESTS, seed=SEED)
    outcome = simulate_plan(plan, arrivals, seed=SEED)
    slowed = None
    if plan.confidence is not None:
        slowed = simulate_plan(as_confident(plan), arrivals, seed=SEED)
    style = resources.files("sizing.report").joinpath("page.css").read_text(encoding="utf-8")
    roles = [pool.role for pool in plan.pools]
    heads = ("", *STATISTICS, f"90 % interval at {plan.slo.percentile}", "SLO")
    latencies = _table(heads, latency_rows(plan, outcome))
    body = [
        _header(plan),
        _section("Latency: forecast, and simulated", latencies),
        _charts(latency_charts(plan, outcome, slowed)),
        _charts(over_time_charts(plan, outcome)),
        _section("Layout", legend((*roles, "free")) + layout_drawing(plan)
                 + _table(POOL_HEADS, pool_rows(plan))),
        _charts(fronts_charts(plan, evaluated(plan.inputs))),
        _section("Assumptions and errors", _facts(assumption_rows(plan, outcome))),
        _section("Sources of the numbers", _facts(source_rows(plan))),
    ]  # fmt: skip
    title = _escape(f"{plan.model.id}: {_hardware(plan)}")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}<footer>minicluster {_escape(plan.provenance.version)},"
        f" sizing plan, inputs {_escape(plan.provenance.inputs_hash)}</footer></main></body>"
        "</html>\n"
    )


POOL_HEADS = ("pool", "replicas", "layout", "GPUs", "batch", "KV/GPU", "used", "bound by")


def _header(plan: Plan) -> str:
    """Say the answer."""
    nodes = f"{plan.cost.nodes} node" + ("s" if plan.cost.nodes > 1 else "") + free_gpus(plan)
    load = plan.workload
    asked = (
        f"{load.requests_per_s:g} requests/s of {_lengths(load.input_tokens.mean)}"
        f"{load.input_tokens.max_tokens:,} tokens in, {_lengths(load.output_tokens.mean)}"
        f"{load.output_tokens.max_tokens:,} out"
    )
    kept = f"{asked}, every limit kept at {plan.slo.percentile}: {layout_of(plan)}."
    return (
        f"<header><h1>{_escape(f'{_hardware(plan)} for {plan.model.id}')}</h1>"
        f"<p>{_escape(kept)}</p>"
        f'<p class="soft">On {_escape(nodes)}. Holds to {plan.headroom.load_factor:.2f} times the'
        f" load, then {_escape(plan.headroom.binds)}.</p>"
        f'<div class="tiles">{"".join(_tiles(plan))}</div></header>'
    )


def _hardware(plan: Plan) -> str:
    """Count the GPUs of every kind."""
    if plan.inputs.gpu.kind == "cpu":
        return f"{plan.cost.gpus} cores"
    return " and ".join(f"{gpus} {kind}" for kind, gpus in kinds_of(plan).items())


def _lengths(mean: int | None) -> str:
    """Say that a length is the longest one, where lengths differ."""
    return "" if mean is not None else "up to "


def _tiles(plan: Plan) -> Iterable[str]:
    """Yield the figures that one looks for first."""
    found, slo = figures(plan), plan.slo
    yield _tile(f"TTFT {slo.percentile}", seconds(found.ttft_s), f"SLO {seconds(slo.ttft_s)}")
    limit = "" if slo.tpot_s is None else f"SLO {seconds(slo.tpot_s)}"
    yield _tile(f"TPOT {slo.percentile}", seconds(found.tpot_s), limit)
    if found.confidence_fraction is not None and plan.confidence is not None:
        at = plan.confidence.gpus_at
        others = ", ".join(f"{gpus} GPUs at {float(name):.0%}" for name, gpus in at.items())
        yield _tile("confidence", f"{found.confidence_fraction:.0%}", others)
    capacity = f"saturates at {plan.prediction.capacity_requests_per_s:.3g}/s"
    yield _tile("headroom", f"{found.headroom_factor:.2f} x", capacity)
    cost = found.running
    if cost.joules_per_output_token is not None and cost.power_w is not None:
        yield _tile(
            "energy", f"{cost.joules_per_output_token:.2f} J/token",
            f"{cost.power_w / 1e3:,.1f} kW, {cost.power_source}",
        )  # fmt: skip
    if cost.usd_per_million_output_tokens is not None and cost.usd_per_hour is not None:
        yield _tile(
            "price", f"${cost.usd_per_million_output_tokens:,.2f}/Mtok",
            f"${cost.usd_per_hour:,.2f} an hour, {cost.price_source}",
        )  # fmt: skip


def _tile(name: str, value: str, below: str) -> str:
    return (
        f'<div class="tile"><span class="soft">{_escape(name)}</span><b>{_escape(value)}</b>'
        f'<span class="soft">{_escape(below)}</span></div>'
    )


def _charts(drawn_charts: Iterable[tuple[str, str]]) -> str:
    """Set charts side by side."""
    inner = "".join(_section(title, chart) for title, chart in drawn_charts)
    return f'<div class="charts">{inner}</div>' if inner else ""


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{_escape(title)}</h2>{inner}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table of figures."""
    head = "".join(f"<th>{_escape(each)}</th>" for each in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    """Write a table of words."""
    body = "".join(f"<tr><td>{_escape(a)}</td><td>{_escape(b)}</td></tr>" for a, b in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def _escape(value: object) -> str:
    return html.escape(str(value))
