"""The rail-only study as charts: the paper's figures, drawn from our model."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from sizing.report.study_chart import HEIGHT, STYLE, WIDTH, StudySeries, bars, lines, short

if TYPE_CHECKING:
    from sizing.network.rail_only_study import Saving, Study, Sweep


def charts(study: Study) -> list[str]:
    """Return the study's charts, each an `<svg>`."""
    sizes = sorted({sweep.gpus for sweep in study.hb_sweeps})
    found = []
    for gpus in sizes:
        sweeps = [sweep for sweep in study.hb_sweeps if sweep.gpus == gpus and sweep.points]
        if sweeps:
            found.append(_iteration_times(gpus, sweeps))
            found.append(_distance(gpus, sweeps))
    for gpus in sizes:
        sweeps = [sweep for sweep in study.batch_sweeps if sweep.gpus == gpus]
        if sweeps:
            found.append(_batches(gpus, sweeps))
    if study.shares:
        found.append(_traffic(study))
    found += [
        _costs(gpus, [saving for saving in study.savings if saving.gpus == gpus])
        for gpus in sizes
        if any(saving.gpus == gpus for saving in study.savings)
    ]
    return found


def page(study: Study) -> str:
    """Return one self-contained HTML page with all charts."""
    warnings = "".join(f"<li>{html.escape(text)}</li>" for text in study.warnings)
    body = "".join(f"<figure>{chart}</figure>" for chart in charts(study))
    name = html.escape(study.conventions.name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}body{{font:15px system-ui,sans-serif;max-width:1100px;margin:2em auto;"
        "padding:0 1em;color:var(--ink);background:var(--paper)}"
        "main{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em}"
        "figure{margin:0}</style></head>"
        f"<body><h1>{name}</h1><ul>{warnings}</ul><main>{body}</main></body></html>\n"
    )


def drawing(study: Study) -> str:
    """Return one SVG file with all charts, two a row."""
    found = charts(study)
    rows = -(-len(found) // 2)
    placed = "".join(
        chart.replace(
            "<svg ", f'<svg x="{index % 2 * WIDTH}" y="{index // 2 * HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" ', 1,
        )
        for index, chart in enumerate(found)
    )  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {rows * HEIGHT}">'
        f"<style>{STYLE}</style>{placed}</svg>\n"
    )


def _iteration_times(gpus: int, sweeps: list[Sweep]) -> str:
    """Draw the step's time over HB sizes."""
    series = [
        StudySeries(
            name=sweep.model,
            x=tuple(point.step.hb_size for point in sweep.points),
            y=tuple(point.total_s for point in sweep.points),
        )
        for sweep in sweeps
    ]
    return lines(
        f"Iteration time, {short(gpus)} GPUs", series, x_name="GPUs of an HB domain", y_name="s"
    )


def _distance(gpus: int, sweeps: list[Sweep]) -> str:
    """Draw how near a step comes to the ideal network over HB sizes."""
    series = [
        StudySeries(
            name=sweep.model,
            x=tuple(point.step.hb_size for point in sweep.points),
            y=tuple(100 * point.relative_performance for point in sweep.points),
        )
        for sweep in sweeps
    ]
    return lines(
        f"Of an ideal any-to-any network, {short(gpus)} GPUs",
        series,
        x_name="GPUs of an HB domain",
        y_name="%",
    )


def _batches(gpus: int, sweeps: list[Sweep]) -> str:
    """Draw relative performance over batches."""
    series = [
        StudySeries(
            name=f"{sweep.model}, HB {sweep.points[0].step.hb_size}",
            x=tuple(point.tokens_per_batch / sweep.points[0].tokens_per_batch / 4
                    for point in sweep.points),
            y=tuple(100 * point.relative_performance for point in sweep.points),
        )
        for sweep in sweeps
    ]  # fmt: skip
    return lines(
        f"Larger batches need less network, {short(gpus)} GPUs",
        series,
        x_name="batch, of the model's own",
        y_name="% of ideal",
    )


def _traffic(study: Study) -> str:
    """Draw the shares of pairs and bytes."""
    shown = [share for share in study.shares if share.gpus == study.shares[0].gpus]
    names = [share.model for share in shown]
    kinds = (
        ("pairs that are silent", [100 * s.traffic.silent_pairs_fraction for s in shown]),
        ("bytes inside HB domains", [100 * s.traffic.hb_bytes_fraction for s in shown]),
    )
    series = [StudySeries(name=name, x=(), y=tuple(values)) for name, values in kinds]
    size = f"{short(shown[0].gpus)} GPUs, HB {shown[0].hb_size}"
    return bars(f"Who talks to whom, {size}", names, series, y_name="%")


def _costs(gpus: int, savings: list[Saving]) -> str:
    """Draw relative costs by radix."""
    names = [f"radix {saving.radix}" for saving in savings]
    kinds = (
        ("Clos", tuple(saving.clos.relative_cost / 1e3 for saving in savings)),
        ("rail-only", tuple(saving.rail_only.relative_cost / 1e3 for saving in savings)),
    )
    series = [StudySeries(name=name, x=(), y=values) for name, values in kinds]
    ratio = f"{savings[0].price_ratio:g}:1"
    return bars(f"Cost at {ratio}, {short(gpus)} GPUs", names, series, y_name="1000 transceivers")
