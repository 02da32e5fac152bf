"""Networks, placements, collectives and their cost as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.units import seconds
from sizing.network.rail_only_study import savings_range
from sizing.report.tables import facts_table, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from minicluster.specs.topology import Topology
    from sizing.latency.library import LeftOut
    from sizing.network.bom import Bill
    from sizing.network.bom_as_built import BuiltBill
    from sizing.network.collective import CollectiveResult
    from sizing.network.ecmp import Collisions
    from sizing.network.network_cost import Crossing
    from sizing.network.pools import PoolPlan
    from sizing.network.rail_only_study import Study
    from sizing.network.ranks import RankPlan

SHOWN = 1e9
"""Bytes of a gigabyte: bandwidths are shown in GB/s."""


def topology_table(found: Topology) -> Table:
    """Return one row per tier, the innermost first."""
    rows = (
        (
            tier.name,
            f"{tier.gpus:,}",
            f"{found.units(index):,}",
            f"{tier.bytes_per_s / SHOWN:.4g}",
            f"{tier.efficiency_fraction:.0%}",
            f"{tier.oversubscription:g}:1",
            seconds(tier.latency_s),
        )
        for index, tier in enumerate(found.tiers)
    )
    heads = ("tier", "GPUs", "units", "GB/s one way", "achieved", "oversubscribed", "hop")
    return table(f"{found.name}: {found.gpus:,} GPUs", heads, rows)


def answer_table(found: CollectiveResult) -> Table:
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
    return facts_table(title, rows)


def left_out_table(found: Sequence[LeftOut]) -> Table:
    """Return each measured point beside its interpolation from the other points."""
    rows = (
        (
            row.library,
            str(row.gpus),
            f"{row.size_bytes:,.0f}",
            seconds(row.seconds),
            seconds(row.predicted_s),
            f"{row.error_fraction:+.1%}" + (" (known outlier)" if row.outlier else ""),
        )
        for row in found
    )
    heads = ("library", "GPUs", "bytes", "measured", "predicted", "error")
    return table("Each point from the others of its table", heads, rows)


def bill_table(found: Bill) -> Table:
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
    return facts_table(title, rows, caption="; ".join(found.notes) or None)


def built_table(found: BuiltBill) -> Table:
    """Return the bill of materials of a network as it was built."""
    counts = zip(found.details, found.switches_per_tier, found.spares_per_tier, strict=True)
    rows = (
        (
            tier.tier,
            tier.model,
            f"{count:,}",
            f"{spare:,}",
            str(tier.ports_used),
            str(tier.ports_with_spares),
            "" if tier.oversubscription is None else f"{tier.oversubscription:g}:1",
        )
        for tier, count, spare in counts
    )
    title = (
        f"{found.name}: {found.gpus:,} GPUs, {found.switches:,} switches,"
        f" {found.transceivers:,} transceivers, {found.copper_links:,} copper links"
    )
    heads = ("tier", "model", "switches", "spares", "ports", "with spares", "oversubscribed")
    return table(title, heads, rows)


def collisions_table(found: Sequence[Collisions]) -> Table:
    """Return the collisions of hashed flows, one row per number of flows."""
    first = found[0].hashing
    rows = (
        (
            str(one.hashing.flows),
            f"{one.imbalance_mean:.2f} ± {one.imbalance_standard_error:.3f}",
            f"{one.imbalance_p99:.2f}",
            f"{one.slowest_fraction:.0%}",
            f"{one.throughput_fraction:.0%}",
            f"{one.idle_fraction:.1%}",
        )
        for one in found
    )
    title = f"{first.pairs} pairs onto {first.uplinks} uplinks, {found[0].trials:,} random hashes"
    heads = ("flows", "fullest / average", "p99", "collective gets", "throughput", "idle uplinks")
    return table(title, heads, rows)


def study_tables(found: Study) -> Iterator[Table]:
    """Yield the rail-only study: HB sizes, traffic, savings."""
    for sweep in found.hb_sweeps:
        steps = (
            (
                f"{point.step.hb_size:,}",
                str(point.step.model_parallel),
                seconds(point.total_s),
                f"{point.relative_performance:.1%}",
                "" if gain is None else f"{gain:.2%}",
            )
            for point, gain in zip(sweep.points, (None, *sweep.gains), strict=True)
        )
        heads = ("HB size", "model parallel", "step", "of ideal", "gain")
        yield table(f"{sweep.model}, {sweep.gpus:,} GPUs", heads, steps)
    shares = (
        (
            share.model,
            f"{share.gpus:,}",
            str(share.hb_size),
            f"{share.optimal_model_parallel:.2f}",
            f"{share.traffic.silent_pairs_fraction:.2%}",
            f"{share.traffic.hb_pairs_fraction:.3%}",
            f"{share.traffic.hb_bytes_fraction:.1%}",
        )
        for share in found.shares
    )
    traffic = ("model", "GPUs", "HB size", "N_M*", "silent pairs", "HB pairs", "HB bytes")
    yield table("Traffic of a step", traffic, shares)
    low, high = savings_range(found.savings)
    savings = (
        (
            f"{saving.gpus:,}",
            str(saving.radix),
            f"{saving.clos.switches:,}",
            f"{saving.rail_only.switches:,}",
            f"{saving.saving_fraction:.1%}",
            f"{saving.links_saved_fraction:.1%}",
        )
        for saving in found.savings
    )
    saved = ("GPUs", "radix", "Clos switches", "rail-only switches", "saving", "links saved")
    title = f"Rail-only saves {low:.1%} to {high:.1%}"
    yield table(title, saved, savings, caption="; ".join(found.warnings) or None)


def cuts_table(found: RankPlan) -> Table:
    """Return one row per tier: the ring and pipeline edges that cross it."""
    verdict = "fewest possible" if found.optimal else "more than the bound"
    rows = (
        (
            cut.tier,
            f"{cut.units:,}",
            f"{cut.ring_edges} of {cut.ring}",
            str(cut.bound),
            f"{cut.random_fraction:.1%}",
            f"{cut.stage_edges:,}",
            f"{cut.uplink_fraction:.0%}",
        )
        for cut in found.cuts
    )
    heads = ("tier", "units", "ring edges cut", "bound", "random order", "stage edges")
    title = f"{len(found.ranks):,} ranks; ring edges cut: {verdict}"
    return table(title, (*heads, "uplinks used"), rows)


def gpu_groups_table(found: PoolPlan) -> Table:
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
    return table(title, ("role", "replica", "stage", "node", "GPUs"), rows, left=("node", "GPUs"))


def crossing_lines(found: Crossing) -> list[str]:
    """Return the KV transfer time by tier, and the cost of TP beyond the HB domain."""
    lines = []
    for each in found.transfers:
        text = f"KV of a mean prompt between pools that meet in {each.tier}:"
        text += f" {seconds(each.seconds)}"
        if each.oversubscription > 1:
            text += f" at {each.oversubscription:g}:1 ({seconds(each.without_oversubscription_s)}"
            text += " without oversubscription)"
        lines.append(text + (", as planned" if each.planned else ""))
    lines += [
        f"TP{wide.tp} in {wide.role}: a step takes {seconds(wide.step_s)}, of which"
        f" {seconds(wide.beyond_s)} for leaving the HB domain; {seconds(wide.now_s)} as planned"
        for wide in found.wide
    ]
    return lines
