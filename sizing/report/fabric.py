"""Networks, placements, collectives and their cost as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.figure import Figure, axis, log_axis
from minicluster.pages.latency import HEADROOM
from minicluster.pages.page import ChartRow, Page, Section
from minicluster.units import seconds
from sizing.network.rail_only_study import BATCHES, RailOnlyResult, Saving, Shares, Sweep
from sizing.report.study import series_figure
from sizing.report.tables import columns_table, facts, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from minicluster.specs.topology import Topology
    from sizing.latency.collectives import LeftOut
    from sizing.network.bom import Bill, BuiltBill
    from sizing.network.collective import CollectiveResult
    from sizing.network.ecmp import Collisions
    from sizing.network.network_cost import Crossing
    from sizing.network.pools import PoolPlan
    from sizing.network.ranks import RankPlan

    Points = tuple[Sequence[float], Sequence[float]]

SHOWN = 1e9
"""Bytes of a gigabyte: bandwidths are shown in GB/s."""


def topology_table(found: Topology) -> Section:
    """Return one row per tier, the innermost first."""
    tiers = found.tiers
    columns = {
        "tier": [tier.name for tier in tiers],
        "GPUs": [f"{tier.gpus:,}" for tier in tiers],
        "units": [f"{found.units(index):,}" for index in range(len(tiers))],
        "GB/s one way": [f"{tier.bytes_per_s / SHOWN:.4g}" for tier in tiers],
        "achieved": [f"{tier.efficiency_fraction:.0%}" for tier in tiers],
        "oversubscribed": [f"{tier.oversubscription:g}:1" for tier in tiers],
        "hop": [seconds(tier.latency_s) for tier in tiers],
    }
    return columns_table(f"{found.name}: {found.gpus:,} GPUs", columns)


def answer_table(found: CollectiveResult) -> Section:
    """Return the time of one collective and its parts."""
    spans = " x ".join(f"{count} {name}" for name, count in found.spans.items())
    rows = [
        ("time", f"{seconds(found.seconds)} ({found.basis})"),
        ("by formula", seconds(found.formula_s)),
        *((f"measured, {name}", seconds(value)) for name, value in found.libraries.items()),
        ("spans", f"{spans}; meets in {found.meets_in}"),
        ("beyond the HB domain", f"{seconds(found.beyond_hb_domain_s)} more, by formula"),
        ("bus bandwidth", f"{found.bus_bytes_per_s / SHOWN:.4g} GB/s"),
    ]
    title = f"{found.pattern} of {found.group} GPUs, {found.size_bytes:,.0f} bytes"
    return facts(title, rows)


def left_out_table(found: Sequence[LeftOut]) -> Section:
    """Return each measured point beside its interpolation from the other points."""
    known = {True: " (known outlier)", False: ""}
    columns = {
        "library": [row.library for row in found],
        "GPUs": [str(row.gpus) for row in found],
        "bytes": [f"{row.size_bytes:,.0f}" for row in found],
        "measured": [seconds(row.seconds) for row in found],
        "predicted": [seconds(row.predicted_s) for row in found],
        "error": [f"{row.error_fraction:+.1%}{known[row.outlier]}" for row in found],
    }
    return columns_table("Each point from the others of its table", columns)


def bill_table(found: Bill) -> Section:
    """Return a bill of materials."""
    per_tier = " + ".join(f"{count:,}" for count in found.switches_per_tier)
    spare = f", {found.spare_switches} of them spare" if found.spare_switches else ""
    rows = [
        ("tiers, trees", f"{found.tiers}, {found.trees:,}"),
        ("switches", f"{found.switches:,} ({per_tier}{spare})"),
        ("links", f"{found.links:,}, {found.copper_links:,} of them copper"),
        ("transceivers", f"{found.transceivers:,}"),
        ("ports used", f"{found.ports_used:,} of {found.ports:,}"),
        ("cost", f"{found.relative_cost:,.0f} transceivers' prices"),
    ]
    if found.kind != "clos":
        rows.append(("saving against Clos", f"{found.saving_fraction:.1%}"))
    if found.power_w is not None:
        rows.append(("power", f"{found.power_w / 1e3:,.1f} kW"))
    for other in found.alternatives:
        counts = f"{other.switches} switches, {other.transceivers} transceivers"
        rows.append((f"or {other.name}", f"{counts}: {other.note}"))
    title = f"{found.kind} of {found.gpus:,} GPUs, HB {found.hb_size}, radix {found.radix}"
    return facts(title, rows, found.notes)


def built_table(found: BuiltBill) -> Section:
    """Return the bill of materials of a network as it was built."""
    tiers = found.details
    ratios = [tier.oversubscription for tier in tiers]
    columns = {
        "tier": [tier.tier for tier in tiers],
        "model": [tier.model for tier in tiers],
        "switches": [f"{count:,}" for count in found.switches_per_tier],
        "spares": [f"{count:,}" for count in found.spares_per_tier],
        "ports": [str(tier.ports_used) for tier in tiers],
        "with spares": [str(tier.ports_with_spares) for tier in tiers],
        "oversubscribed": ["" if ratio is None else f"{ratio:g}:1" for ratio in ratios],
    }
    title = (
        f"{found.name}: {found.gpus:,} GPUs, {found.switches:,} switches,"
        f" {found.transceivers:,} transceivers, {found.copper_links:,} copper links"
    )
    return columns_table(title, columns)


def collisions_table(found: Sequence[Collisions]) -> Section:
    """Return the collisions of hashed flows, one row per number of flows."""
    columns = {
        "flows": [str(one.hashing.flows) for one in found],
        "fullest / average": [
            f"{one.imbalance_mean:.2f} ± {one.imbalance_standard_error:.3f}" for one in found
        ],
        "p99": [f"{one.imbalance_p99:.2f}" for one in found],
        "collective gets": [f"{one.slowest_fraction:.0%}" for one in found],
        "throughput": [f"{one.throughput_fraction:.0%}" for one in found],
        "idle uplinks": [f"{one.idle_fraction:.1%}" for one in found],
    }
    first = found[0].hashing
    title = f"{first.pairs} pairs onto {first.uplinks} uplinks, {found[0].trials:,} random hashes"
    return columns_table(title, columns)


def study_tables(found: RailOnlyResult) -> Iterator[Section]:
    """Yield the rail-only study: HB sizes, traffic, savings."""
    for sweep in found.hb_sweeps:
        points = sweep.points
        columns = {
            "HB size": [f"{point.step.hb_size:,}" for point in points],
            "model parallel": [str(point.step.model_parallel) for point in points],
            "step": [seconds(point.total_s) for point in points],
            "of ideal": [f"{point.relative_performance:.1%}" for point in points],
            "gain": ["", *(f"{gain:.2%}" for gain in sweep.gains)],
        }
        yield columns_table(f"{sweep.model}, {sweep.gpus:,} GPUs", columns)
    shares = found.shares
    columns = {
        "model": [share.model for share in shares],
        "GPUs": [f"{share.gpus:,}" for share in shares],
        "HB size": [str(share.step.hb_size) for share in shares],
        "N_M*": [f"{share.optimal_model_parallel:.2f}" for share in shares],
        "silent pairs": [f"{share.silent_pairs_fraction:.2%}" for share in shares],
        "HB pairs": [f"{share.hb_pairs_fraction:.3%}" for share in shares],
        "HB bytes": [f"{share.hb_bytes_fraction:.1%}" for share in shares],
    }
    yield columns_table("Traffic of a step", columns)
    savings = found.savings
    columns = {
        "GPUs": [f"{saving.gpus:,}" for saving in savings],
        "radix": [str(saving.radix) for saving in savings],
        "Clos switches": [f"{saving.clos.switches:,}" for saving in savings],
        "rail-only switches": [f"{saving.rail_only.switches:,}" for saving in savings],
        "saving": [f"{saving.saving_fraction:.1%}" for saving in savings],
        "links saved": [f"{saving.links_saved_fraction:.1%}" for saving in savings],
    }
    low, high = found.savings_range
    title = f"Rail-only saves {low:.1%} to {high:.1%}"
    yield columns_table(title, columns, notes=found.warnings)


def cuts_table(found: RankPlan) -> Section:
    """Return one row per tier: the ring and pipeline edges that cross it."""
    cuts = found.cuts
    columns = {
        "tier": [cut.tier for cut in cuts],
        "units": [f"{cut.units:,}" for cut in cuts],
        "ring edges cut": [f"{cut.ring_edges} of {cut.ring}" for cut in cuts],
        "bound": [str(cut.bound) for cut in cuts],
        "random order": [f"{cut.random_fraction:.1%}" for cut in cuts],
        "stage edges": [f"{cut.stage_edges:,}" for cut in cuts],
        "uplinks used": [f"{cut.uplink_fraction:.0%}" for cut in cuts],
    }
    verdict = "fewest possible" if found.optimal else "more than the bound"
    return columns_table(f"{len(found.ranks):,} ranks; ring edges cut: {verdict}", columns)


def gpu_groups_table(found: PoolPlan) -> Section:
    """Return one row per replica, stage and node with its GPUs."""
    verdict = "optimal, proved by the bound" if found.optimal else "not proved optimal"
    meeting = ", ".join(f"{t} {x:.0%}" for t, x in found.meeting_fraction.items() if x)
    title = (
        f"cost {found.cost:.3g} link seconds per second, bound {found.bound:.3g}: {verdict}"
        f" ({found.method})"
    )
    if meeting:
        title += f"\npairs meet in: {meeting}; {found.rail_aligned_fraction:.0%} on one rail"
    rows = []
    for group in found.groups:
        nodes: dict[str, list[str]] = {}
        for node, gpu in group.gpus:
            nodes.setdefault(node, []).append(str(gpu))
        at = (group.role, str(group.replica), str(group.stage))
        rows += [(*at, node, " ".join(gpus)) for node, gpus in nodes.items()]
    return table(title, ("role", "replica", "stage", "node", "GPUs"), rows, words=("node", "GPUs"))


def crossing_lines(found: Crossing) -> list[str]:
    """Return the KV transfer time by tier, and the cost of TP beyond the HB domain."""
    lines = []
    for each in found.transfers:
        text = f"KV of a mean prompt between pools that meet in {each.tier}:"
        text += f" {seconds(each.seconds)}"
        if each.oversubscription > 1:
            text += f" alone, {seconds(each.all_sending_s)} while all GPUs send"
            text += f" ({each.oversubscription:g}:1)"
        lines.append(text + (", as planned" if each.planned else ""))
    lines += [
        f"TP{wide.tp} in {wide.role}: a step takes {seconds(wide.step_s)}, of which"
        f" {seconds(wide.beyond_s)} for leaving the HB domain"
        for wide in found.wide
    ]
    return lines


def study_page(study: RailOnlyResult) -> Page:
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


def study_figures(study: RailOnlyResult) -> Iterator[Figure]:
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
