"""The page of the rail-only study: the paper's figures, drawn from our model."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from minicluster.pages.figure import SERIES_COLOURS, Figure, axes, axis, bars, log_axis, marks
from minicluster.pages.latency import HEADROOM
from minicluster.pages.page import ChartRow, Page
from sizing.network.rail_only_study import BATCHES, savings_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sizing.network.rail_only_study import Saving, Shares, Study, Sweep

    Points = tuple[Sequence[float], Sequence[float]]


def study_page(study: Study) -> Page:
    """Return the page of a study: its charts and the warnings about its conventions."""
    lines: tuple[str, ...] = ()
    if study.savings:
        low, high = savings_range(study.savings)
        saving = f"Rail-only networks cost {low:.0%} to {high:.0%} less than a Clos network"
        ratio = f"{study.savings[0].price_ratio:g} times as much as a transceiver"
        lines = (f"{saving}, if a switch port costs {ratio}.",)
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
    sizes = sorted({sweep.gpus for sweep in study.hb_sweeps})
    for gpus in sizes:
        sweeps = [sweep for sweep in study.hb_sweeps if sweep.gpus == gpus and sweep.points]
        if sweeps:
            yield from _hb_sweeps(gpus, sweeps)
    for gpus in sizes:
        sweeps = [sweep for sweep in study.batch_sweeps if sweep.gpus == gpus]
        if sweeps:
            yield _batches(gpus, sweeps)
    if study.shares:
        yield _traffic([share for share in study.shares if share.gpus == study.shares[0].gpus])
    for gpus in sizes:
        savings = [saving for saving in study.savings if saving.gpus == gpus]
        if savings:
            yield _costs(gpus, savings)


def short(value: float) -> str:
    """Write a number in short for an axis: 2K, 16K, 4M."""
    for unit, name in ((1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    if value >= 1024 and value % 1024 == 0:  # noqa: PLR2004  (sizes of clusters are powers of two)
        return f"{value / 1024:.3g}K"
    return f"{value:.4g}"


def _hb_sweeps(gpus: int, sweeps: list[Sweep]) -> Iterator[Figure]:
    """Draw the time of an iteration, and the distance to an ideal network, by HB size."""
    sizes: dict[str, list[float]] = {
        sweep.model: [point.step.hb_size for point in sweep.points] for sweep in sweeps
    }
    times = {sweep.model: [point.total_s for point in sweep.points] for sweep in sweeps}
    shares = {sweep.model: _relative(sweep) for sweep in sweeps}
    for title, ys, y_name in (
        ("Iteration time", times, "s"),
        ("Of an ideal any-to-any network", shares, "%"),
    ):
        series = {model: (sizes[model], ys[model]) for model in sizes}
        named = f"{title}, {short(gpus)} GPUs"
        yield _lines(named, series, x_name="GPUs of an HB domain", y_name=y_name)


def _batches(gpus: int, sweeps: list[Sweep]) -> Figure:
    series: dict[str, Points] = {}
    for sweep in sweeps:
        first = sweep.points[0]
        name = f"{sweep.model}, HB {first.step.hb_size}"
        own = first.tokens_per_batch
        factors = [BATCHES[0] * point.tokens_per_batch / own for point in sweep.points]
        series[name] = factors, _relative(sweep)
    title = f"Larger batches need less network, {short(gpus)} GPUs"
    return _lines(title, series, x_name="batch, times the model's own", y_name="% of ideal")


def _relative(sweep: Sweep) -> list[float]:
    return [100 * point.relative_performance for point in sweep.points]


def _traffic(shares: list[Shares]) -> Figure:
    first = shares[0]
    return _bars(
        f"Which pairs exchange bytes, {short(first.gpus)} GPUs, HB {first.hb_size}",
        [share.model for share in shares],
        {
            "pairs that are silent": [100 * s.traffic.silent_pairs_fraction for s in shares],
            "bytes inside HB domains": [100 * s.traffic.hb_bytes_fraction for s in shares],
        },
        y_name="%",
    )


def _costs(gpus: int, savings: list[Saving]) -> Figure:
    return _bars(
        f"Cost at {savings[0].price_ratio:g}:1, {short(gpus)} GPUs",
        [f"radix {saving.radix}" for saving in savings],
        {
            "Clos": [saving.clos.relative_cost / 1e3 for saving in savings],
            "rail-only": [saving.rail_only.relative_cost / 1e3 for saving in savings],
        },
        y_name="1000 transceivers",
    )


def _lines(title: str, series: Mapping[str, Points], *, x_name: str, y_name: str) -> Figure:
    """Draw lines over a logarithmic axis, 0 at the foot of the other."""
    known = sorted({x for xs, _ in series.values() for x in xs})
    top = HEADROOM * max(max(ys) for _, ys in series.values())
    return Figure(
        title=title,
        caption="; ".join(
            f"{name}: {ys[0]:.4g} {y_name} at {short(xs[0])}, {ys[-1]:.4g} at {short(xs[-1])}"
            for name, (xs, ys) in series.items()
        ),
        traces=tuple(
            marks(name, xs, ys, colour=colour, lines=True, hover=f"%{{x:,}}: %{{y:.4g}} {y_name}")
            for (name, (xs, ys)), colour in zip(series.items(), cycle(SERIES_COLOURS), strict=False)
        ),
        layout=axes(
            log_axis(x_name, {x: short(x) for x in known}, known[0] / 1.1, 1.1 * known[-1]),
            axis(y_name, 0.0, top),
        ),
    )


def _bars(
    title: str, names: Sequence[str], series: Mapping[str, Sequence[float]], *, y_name: str
) -> Figure:
    return Figure(
        title=title,
        caption="; ".join(
            f"{label}: {', '.join(f'{name} {y:.4g}' for name, y in zip(names, ys, strict=True))}"
            for label, ys in series.items()
        ),
        traces=tuple(
            bars(label, names, ys, colour=colour, hover=f"%{{x}}: %{{y:.4g}} {y_name}")
            for (label, ys), colour in zip(series.items(), cycle(SERIES_COLOURS), strict=False)
        ),
        layout=axes({"type": "category"}, axis(y_name)),
    )
