"""Networks, collectives and their cost as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from minicluster.units import seconds
from sizing.network.rail_only_study import savings_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minicluster.specs.topology import Topology
    from sizing.latency.library import LeftOut
    from sizing.network.bom import Bill
    from sizing.network.bom_as_built import BuiltBill
    from sizing.network.collective import CollectiveResult
    from sizing.network.ecmp import Collisions
    from sizing.network.rail_only_study import Study

SHOWN = 1e9
"""Bytes of a gigabyte: bandwidths are shown in GB/s."""


def topology_table(found: Topology) -> Table:
    """Return one row per tier, the innermost first."""
    table = _table(
        f"{found.name}: {found.gpus:,} GPUs",
        ("tier", "GPUs", "units", "GB/s one way", "achieved", "oversubscribed", "hop"),
    )
    for index, tier in enumerate(found.tiers):
        table.add_row(
            tier.name,
            f"{tier.gpus:,}",
            f"{found.units(index):,}",
            f"{tier.bytes_per_s / SHOWN:.4g}",
            f"{tier.efficiency_fraction:.0%}",
            f"{tier.oversubscription:g}:1",
            seconds(tier.latency_s),
        )
    return table


def answer_table(found: CollectiveResult) -> Table:
    """Return the time of one collective and its parts."""
    table = _table(
        f"{found.pattern} of {found.group} GPUs, {found.size_bytes:,.0f} bytes", ("", "")
    )
    table.add_row("time", f"{seconds(found.seconds)} ({found.basis})")
    table.add_row("by formula", seconds(found.formula_s))
    for library, value in found.libraries.items():
        table.add_row(f"measured, {library}", seconds(value))
    spans = " x ".join(f"{count} {name}" for name, count in found.spans.items())
    table.add_row("spans", f"{spans}; meets in {found.meets_in}")
    table.add_row("beyond the HB domain", f"{seconds(found.beyond_hb_domain_s)} more, by formula")
    table.add_row("bus bandwidth", f"{found.bus_bytes_per_s / SHOWN:.4g} GB/s")
    return table


def left_out_table(rows: Sequence[LeftOut]) -> Table:
    """Return each measured point beside its interpolation from the other points."""
    table = _table(
        "Each point from the others of its table",
        ("library", "GPUs", "bytes", "measured", "predicted", "error"),
    )
    for row in rows:
        table.add_row(
            row.library,
            str(row.gpus),
            f"{row.size_bytes:,.0f}",
            seconds(row.seconds),
            seconds(row.predicted_s),
            f"{row.error_fraction:+.1%}" + (" (known outlier)" if row.outlier else ""),
        )
    return table


def bill_table(found: Bill) -> Table:
    """Return a bill of materials."""
    title = f"{found.kind} of {found.gpus:,} GPUs, HB {found.hb_size}, radix {found.radix}"
    table = _table(title, ("", ""))
    table.caption = "; ".join(found.notes) or None
    table.add_row("tiers, trees", f"{found.tiers}, {found.trees:,}")
    per_tier = " + ".join(f"{count:,}" for count in found.switches_per_tier)
    spare = f", {found.spare_switches} of them spare" if found.spare_switches else ""
    table.add_row("switches", f"{found.switches:,} ({per_tier}{spare})")
    table.add_row("links", f"{found.links:,}, {found.copper_links:,} of them copper")
    table.add_row("transceivers", f"{found.transceivers:,}")
    table.add_row("ports used", f"{found.ports_used:,} of {found.ports:,}")
    table.add_row("cost", f"{found.relative_cost:,.0f} transceivers' prices")
    if found.kind != "clos":
        table.add_row("saving against Clos", f"{found.saving_fraction:.1%}")
    if found.power_w is not None:
        table.add_row("power", f"{found.power_w / 1e3:,.1f} kW")
    for other in found.alternatives:
        counts = f"{other.switches} switches, {other.transceivers} transceivers"
        table.add_row(f"or {other.name}", f"{counts}: {other.note}")
    return table


def built_table(found: BuiltBill) -> Table:
    """Return the bill of materials of a network as it was built."""
    table = _table(
        f"{found.name}: {found.gpus:,} GPUs, {found.switches:,} switches,"
        f" {found.transceivers:,} transceivers, {found.copper_links:,} copper links",
        ("tier", "model", "switches", "spares", "ports", "with spares", "oversubscribed"),
    )
    for tier, count, spare in zip(
        found.details, found.switches_per_tier, found.spares_per_tier, strict=True
    ):
        table.add_row(
            tier.tier,
            tier.model,
            f"{count:,}",
            f"{spare:,}",
            str(tier.ports_used),
            str(tier.ports_with_spares),
            "" if tier.oversubscription is None else f"{tier.oversubscription:g}:1",
        )
    return table


def collisions_table(found: Sequence[Collisions]) -> Table:
    """Return the collisions of hashed flows, one row per number of flows."""
    first = found[0].hashing
    table = _table(
        f"{first.pairs} pairs onto {first.uplinks} uplinks, {found[0].trials:,} random hashes",
        ("flows", "fullest / average", "p99", "collective gets", "throughput", "idle uplinks"),
    )
    for one in found:
        table.add_row(
            str(one.hashing.flows),
            f"{one.imbalance_mean:.2f} ± {one.imbalance_standard_error:.3f}",
            f"{one.imbalance_p99:.2f}",
            f"{one.slowest_fraction:.0%}",
            f"{one.throughput_fraction:.0%}",
            f"{one.idle_fraction:.1%}",
        )
    return table


def study_tables(found: Study) -> Iterator[Table]:
    """Yield the rail-only study: HB sizes, traffic, savings."""
    for sweep in found.hb_sweeps:
        table = _table(
            f"{sweep.model}, {sweep.gpus:,} GPUs",
            ("HB size", "model parallel", "step", "of ideal", "gain"),
        )
        for point, gain in zip(sweep.points, (None, *sweep.gains), strict=True):
            table.add_row(
                f"{point.step.hb_size:,}",
                str(point.step.model_parallel),
                seconds(point.total_s),
                f"{point.relative_performance:.1%}",
                "" if gain is None else f"{gain:.2%}",
            )
        yield table
    yield _traffic_table(found)
    low, high = savings_range(found.savings)
    table = _table(
        f"Rail-only saves {low:.1%} to {high:.1%}",
        ("GPUs", "radix", "Clos switches", "rail-only switches", "saving", "links saved"),
    )
    table.caption = "; ".join(found.warnings) or None
    for saving in found.savings:
        table.add_row(
            f"{saving.gpus:,}",
            str(saving.radix),
            f"{saving.clos.switches:,}",
            f"{saving.rail_only.switches:,}",
            f"{saving.saving_fraction:.1%}",
            f"{saving.links_saved_fraction:.1%}",
        )
    yield table


def _traffic_table(found: Study) -> Table:
    """Return the shares of GPU pairs that exchange data."""
    table = _table(
        "Traffic of a step",
        ("model", "GPUs", "HB size", "N_M*", "silent pairs", "HB pairs", "HB bytes"),
    )
    for share in found.shares:
        table.add_row(
            share.model,
            f"{share.gpus:,}",
            str(share.hb_size),
            f"{share.optimal_model_parallel:.2f}",
            f"{share.traffic.silent_pairs_fraction:.2%}",
            f"{share.traffic.hb_pairs_fraction:.3%}",
            f"{share.traffic.hb_bytes_fraction:.1%}",
        )
    return table


def _table(title: str, headings: tuple[str, ...]) -> Table:
    """Make a table, numbers to the right."""
    table = Table(title=title, title_justify="left", show_header=any(headings))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index and any(headings) else "left")
    return table
