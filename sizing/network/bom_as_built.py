"""The bill of materials of a network as it was built, tier by tier."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from sizing.network.bom import Parts, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minicluster.specs.cluster import ClusterSpec
    from minicluster.specs.fabric import SwitchSpec, SwitchTierSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltTier:
    """
    Switches of one tier.

    Attributes:
        tier: name of the tier whose units the switches make.
        units: number of those units.
        switches_per_unit: switches that the traffic needs; `spares_per_unit` come on top.
        ports_used: ports of one switch in use.
        ports_with_spares: the same when the spares of the tier above are cabled too.
        oversubscription: downlinks over uplinks that are in use; `None` at the top.
    """

    tier: str
    model: str
    units: int
    switches_per_unit: int
    spares_per_unit: int
    ports_used: int
    ports_with_spares: int
    oversubscription: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltBill(Parts):
    """
    Parts of a network as built, the spares not among its switches.

    Attributes:
        switches_with_spares: of all tiers.
    """

    name: str
    switches_with_spares: int
    spares_per_tier: tuple[int, ...]
    details: tuple[BuiltTier, ...]


def built_bill(
    cluster: ClusterSpec, switches: Mapping[str, SwitchSpec], *, price_ratio: float = 2.0
) -> BuiltBill:
    """
    Count what the switches of `[[fabric.switches]]` come to.

        per unit ⌈links from below / down⌉ switches, each with `up` links      (docs/model.md,
        eq. B4)

    Raises:
        InputError: the cluster says no switches, or a switch has fewer ports than are cabled.

    Ignores:
        Links to spares: they carry traffic only when another switch is down.
    """
    fabric = cluster.fabric
    if fabric is None or not fabric.switches:
        raise InputError(
            f"cluster {cluster.name}: fabric.switches",
            None,
            "its switches tier by tier",
            "--gpus, --hb-size, --radix and --kind count the smallest tree",
        )
    models = [_model(at, switches) for at in fabric.switches]
    links, details = _tiers(cluster, fabric.switches, models)
    per_tier = tuple(tier.units * tier.switches_per_unit for tier in details)
    spares = tuple(tier.units * tier.spares_per_unit for tier in details)
    bought = zip(per_tier, spares, models, strict=True)
    parts = counted(
        fabric.kind,
        switches=per_tier,
        links=tuple(links),
        copper_links=sum(
            count for count, at in zip(links, fabric.switches, strict=True) if at.copper_down
        ),
        ports=sum((count + spare) * model.ports for count, spare, model in bought),
        price_ratio=price_ratio,
    )
    return BuiltBill(
        **parts,
        name=cluster.name,
        switches_with_spares=sum(per_tier) + sum(spares),
        spares_per_tier=spares,
        details=tuple(details),
    )


def _model(at: SwitchTierSpec, switches: Mapping[str, SwitchSpec]) -> SwitchSpec:
    """Return the switches of a tier, or refuse one with too few ports."""
    place, used = f"fabric.switches.{at.tier}.model", at.down + at.up
    if at.model not in switches:
        raise InputError(place, at.model, "one of " + ", ".join(switches))
    model = switches[at.model]
    if used > model.ports:
        raise InputError(
            place,
            model.name,
            f"a switch of {used} ports or more: {at.down} down and {at.up} up",
            f"{model.name} has {model.ports}",
        )
    return model


def _tiers(
    cluster: ClusterSpec, built: tuple[SwitchTierSpec, ...], models: Sequence[SwitchSpec]
) -> tuple[list[int], list[BuiltTier]]:
    """Return the links into each tier from below, and its switches."""
    sizes = {tier.name: tier.gpus for tier in cluster.tiers}
    total = cluster.tiers[-1].gpus
    arriving, links, details = total, [], []
    for at, above, model in zip(built, (*built[1:], None), models, strict=True):
        units = total // sizes[at.tier]
        per_unit = math.ceil(arriving / units / at.down)
        links.append(arriving)
        arriving = units * per_unit * at.up
        more = 0
        if above is not None:
            # A spare above wants as many links from here as any other switch there has.
            switches_above = math.ceil(arriving * sizes[above.tier] / total / above.down)
            more = math.ceil(at.up * above.spares / switches_above)
        details.append(
            BuiltTier(
                tier=at.tier,
                model=model.name,
                units=units,
                switches_per_unit=per_unit,
                spares_per_unit=at.spares,
                ports_used=at.down + at.up,
                ports_with_spares=at.down + at.up + more,
                oversubscription=at.down / at.up if at.up else None,
            )
        )
    return links, details
