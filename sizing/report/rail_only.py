"""The page of the rail-only study: the paper's figures, drawn from our model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.figure import Figure, axis, log_axis
from minicluster.pages.latency import HEADROOM
from minicluster.pages.page import ChartRow, Page
from sizing.network.rail_only_study import BATCHES
from sizing.report.series_chart import series_figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sizing.network.rail_only_study import Saving, Shares, Study, Sweep

    Points = tuple[Sequence[float], Sequence[float]]


def study_page(study: Study) -> Page:
    """Return the page of a study: its charts and the warnings about its conventions."""
    lines: tuple[str, ...] = ()
    if study.savings:
        low, high = study.savings_range
        saving = f"Rail-only networks cost {low:.0%} to {high:.0%} less than a Clos network"
        lines = (f"{saving}, if a switch port costs {study.price_ratio:g} times a transceiver.",)
    return Page(
        title=study.conventions.name,
        headline=f"Study {study.conventions.name}",
        lines=lines,
        notes=study.warnings,
        parts=(ChartRow(tuple(study_figures(study))),),
        footer="sizing fabric rail-only",
    )


def study_figures(study: Study) -> Iterator[Figure]:
    """Draw time and distance of sweeps, batches, traffic and costs, where the study has them."""
    for gpus in study.conventions.gpus:
        at = f"{short(gpus)} GPUs"
        sweeps = [each for each in study.hb_sweeps if each.gpus == gpus and each.points]
        if sweeps:
            sizes = {each.model: [point.step.hb_size for point in each.points] for each in sweeps}
            for title, values_of, unit in (
                ("Iteration time", _seconds, "s"),
                ("Of an ideal any-to-any network", _relative, "%"),
            ):
                series = {each.model: (sizes[each.model], values_of(each)) for each in sweeps}
                yield _lines(f"{title}, {at}", series, ("GPUs of an HB domain", unit))
        batches = {
            f"{each.model}, HB {each.points[0].step.hb_size}": (BATCHES, _relative(each))
            for each in study.batch_sweeps
            if each.gpus == gpus
        }
        if batches:
            names = ("batch, times the model's own", "% of ideal")
            yield _lines(f"Larger batches need less network, {at}", batches, names)
        savings = [saving for saving in study.savings if saving.gpus == gpus]
        if savings:
            yield _costs(f"Cost at {study.price_ratio:g}:1, {at}", savings)
    if study.shares:
        first = study.shares[0].gpus
        yield _traffic([share for share in study.shares if share.gpus == first])


def short(value: float) -> str:
    """Write a number in short for an axis: 2K, 16K, 4M."""
    for unit, name in ((1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    if value >= 1024 and value % 1024 == 0:  # noqa: PLR2004  (sizes of clusters are powers of two)
        return f"{value / 1024:.3g}K"
    return f"{value:.4g}"


def _seconds(sweep: Sweep) -> list[float]:
    return [point.total_s for point in sweep.points]


def _relative(sweep: Sweep) -> list[float]:
    return [100 * point.relative_performance for point in sweep.points]


def _lines(title: str, series: Mapping[str, Points], names: tuple[str, str]) -> Figure:
    """Draw lines over a logarithmic axis, 0 at the foot of the other."""
    known = sorted({x for xs, _ in series.values() for x in xs})
    top = HEADROOM * max(max(ys) for _, ys in series.values())
    x_axis = log_axis(names[0], {x: short(x) for x in known}, known[0] / 1.1, 1.1 * known[-1])
    return series_figure(title, series, x_axis, axis(names[1], 0.0, top), unit=names[1])


def _traffic(shares: list[Shares]) -> Figure:
    step, models = shares[0].step, [share.model for share in shares]
    series = {
        "pairs that are silent": (models, [100 * s.silent_pairs_fraction for s in shares]),
        "bytes inside HB domains": (models, [100 * s.hb_bytes_fraction for s in shares]),
    }
    title = f"Which pairs exchange bytes, {short(step.gpus)} GPUs, HB {step.hb_size}"
    return series_figure(title, series, {"type": "category"}, axis("%"), unit="%")


def _costs(title: str, savings: list[Saving]) -> Figure:
    radices, unit = [f"radix {saving.radix}" for saving in savings], "1000 transceivers"
    series = {
        "Clos": (radices, [saving.clos.relative_cost / 1e3 for saving in savings]),
        "rail-only": (radices, [saving.rail_only.relative_cost / 1e3 for saving in savings]),
    }
    return series_figure(title, series, {"type": "category"}, axis(unit), unit=unit)
