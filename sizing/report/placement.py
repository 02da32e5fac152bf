"""A placement on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from minicluster.units import seconds

if TYPE_CHECKING:
    from sizing.network.network_cost import Crossing
    from sizing.network.pools import PoolPlan
    from sizing.network.ranks import RankPlan


def cuts_table(found: RankPlan) -> Table:
    """Return one row per tier: the ring and pipeline edges that cross it."""
    verdict = "fewest possible" if found.optimal else "more than the bound"
    table = Table(
        "tier", "units", "ring edges cut", "bound", "random order", "stage edges", "uplinks used",
        title=f"{len(found.ranks):,} ranks; ring edges cut: {verdict}", title_justify="left",
    )  # fmt: skip
    for cut in found.cuts:
        table.add_row(
            cut.tier,
            f"{cut.units:,}",
            f"{cut.ring_edges} of {cut.ring}",
            str(cut.bound),
            f"{cut.random_fraction:.1%}",
            f"{cut.stage_edges:,}",
            f"{cut.uplink_fraction:.0%}",
        )
    return table


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
    table = Table("role", "replica", "stage", "node", "GPUs", title=title, title_justify="left")
    for group in found.groups:
        nodes: dict[str, list[str]] = {}
        for node, gpu in group.gpus:
            nodes.setdefault(node, []).append(str(gpu))
        for node, gpus in nodes.items():
            table.add_row(group.role, str(group.replica), str(group.stage), node, " ".join(gpus))
    return table


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
