"""The bill of materials of a network: switches, links, transceivers, relative cost, power."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Options, Positive, Whole, choice, one_of
from minicluster.specs.fabric import KINDS, SwitchSpec, SwitchTierSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minicluster.specs.cluster import ClusterSpec

MAX_TIERS = 3
"""Trees in use have three tiers at most: a fourth adds a hop and a third of the switches."""


def tiers_needed(endpoints: int, radix: int) -> int:
    """
    Return how many tiers of switches join *endpoints* at full bisection.

        1 if n <= R, 2 if n <= 2 (R/2)^2, 3 if n <= 2 (R/2)^3      (docs/model.md, eq. B1)

    Raises:
        InputError: no tree of three tiers holds them, or a switch of one port.

    Source:
        Fat trees: half of the ports of every switch but the topmost lead up.
    """
    if radix < 2:  # noqa: PLR2004  (a link has two ends)
        raise InputError("--radix", radix, "2 ports or more: a switch joins at least two")
    half = radix // 2
    for tiers in range(1, MAX_TIERS + 1):
        if endpoints <= (radix if tiers == 1 else 2 * half**tiers):
            return tiers
    even = 2 * math.ceil(math.cbrt(endpoints / 2) - 1e-9)
    raise InputError(
        "--radix",
        radix,
        f"enough ports for a tree of {MAX_TIERS} tiers over {endpoints:,} endpoints:"
        f" {radix} ports reach {2 * half**MAX_TIERS:,}",
        f"{even} ports would do",
    )


def tree(endpoints: int, radix: int, *, leaves: int | None = None) -> tuple[int, ...]:
    """
    Return the switches of the smallest tree, leaf to core; links below a tier: one an endpoint.

        leaves ⌈n/⌊R/2⌋⌉, as many in the middle, ⌈n/R⌉ on top; links n a tier
        (docs/model.md, eq. B2)

    Args:
        endpoints: n.
        radix: R; the odd port of an odd radix stays free.
        leaves: number of leaves where wiring by rail asks for more.

    Raises:
        InputError: no tree of three tiers holds them.

    Source:
        NVIDIA DGX SuperPOD reference architecture (H100, B200): its counts at 512 to 16,384 GPUs.
    """
    tiers = tiers_needed(endpoints, radix)
    if tiers == 1:
        return (1,)
    half = radix // 2
    lowest = math.ceil(endpoints / half)
    middle = (lowest,) * (tiers - 2)
    top = math.ceil(endpoints / (2 * half))
    return (leaves or lowest, *middle, top)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOrder(Options):
    """
    The network to be built.

    Attributes:
        gpus: number of GPUs (endpoints).
        hb_size: GPUs per HB domain, one rail each.
        radix: ports per switch.
        kind: network: clos, rail-optimised or rail-only.
        dac_tiers: number of lowest tiers with copper cables.
        spares: spare switches per tree; bought, not cabled.
        price_ratio: price of a switch port over that of a transceiver.
        switch_port_power_w: watts per switch port.
        transceiver_power_w: watts per transceiver.
    """

    gpus: Count
    hb_size: Count = 8
    radix: Count = 64
    kind: Annotated[str, choice(*KINDS)] = "clos"
    dac_tiers: Whole = 0
    spares: Whole = 0
    price_ratio: Positive = 2.0
    switch_port_power_w: NotNegative | None = None
    transceiver_power_w: NotNegative | None = None

    def _check(self) -> None:
        if self.gpus % self.hb_size:
            raise InputError(
                "--gpus", self.gpus, f"whole HB domains: a multiple of --hb-size {self.hb_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to build a network this small."""

    name: str
    switches: int
    links: int
    transceivers: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """
    Parts of a network.

    Attributes:
        tiers: tiers of switches above a GPU.
        switches_per_tier: switches of each tier, from leaf to core.
        links_per_tier: cables, from the GPUs up.
        transceivers: two on each optical link, none on copper.
        ports: ports of all switches, spares included.
        ports_used: ports with a link.
        relative_cost: cost in prices of a transceiver; copper counts nothing.
    """

    kind: str
    gpus: int
    tiers: int
    switches: int
    switches_per_tier: tuple[int, ...]
    links: int
    links_per_tier: tuple[int, ...]
    transceivers: int
    copper_links: int
    ports: int
    ports_used: int
    relative_cost: float


def counted(
    kind: str,
    *,
    switches: tuple[int, ...],
    links: tuple[int, ...],
    copper_links: int,
    ports: int,
    price_ratio: float,
) -> dict[str, Any]:
    """Return the fields of `Parts`, from switches and links of every tier."""
    transceivers = 2 * (sum(links) - copper_links)
    return {
        "kind": kind,
        "gpus": links[0],
        "tiers": len(switches),
        "switches": sum(switches),
        "switches_per_tier": switches,
        "links": sum(links),
        "links_per_tier": links,
        "transceivers": transceivers,
        "copper_links": copper_links,
        "ports": ports,
        "ports_used": 2 * sum(links) - links[0],
        "relative_cost": price_ratio * ports + transceivers,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill(Parts):
    """
    Parts of the smallest network, the spares among its switches.

    Attributes:
        trees: separate networks: 1 of a Clos; of rail-only the rails, or what is left of them
            after several share a switch.
        power_w: power of switches and transceivers; `None` unless both powers were given.
        saving_fraction: share of relative_cost saved against a Clos of the same order.
        endpoints_per_leaf: GPUs that lose their link with one leaf switch.
    """

    hb_size: int
    radix: int
    trees: int
    spare_switches: int
    power_w: float | None
    saving_fraction: float
    endpoints_per_leaf: int
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


def bill(order: NetworkOrder) -> Bill:
    """
    Count what a network with full bisection consists of.

        transceivers 2 (links - copper links), cost r ports + transceivers
        (docs/model.md, eq. B3), power p_p ports + p_t transceivers

    Rail-only has K trees, one a rail, of the endpoints in N/K HB domains of K GPUs; rails of one
    tier share a switch as long as its ports last. Counts are those of all trees together.

    Raises:
        InputError: no tree of three tiers holds the endpoints.

    Source:
        Rail-only networks (arXiv 2307.12169): 37.5 to 75 % saved at 2:1 on 32,768 and 65,536
        GPUs; NVIDIA's SuperPOD tables.

    Ignores:
        Price and power of copper; racks and lengths: which tiers copper can reach is an input.
    """
    found = whole = _billed(order)
    if order.kind != "clos":
        whole = bill(replace(order, kind="clos"))
        saving = 1 - found.relative_cost / whole.relative_cost
        found = replace(found, saving_fraction=saving)
    return replace(found, notes=tuple(_notes(order, found, whole)), alternatives=_small(order))


def _rail_leaves(order: NetworkOrder) -> int | None:
    """Return the leaves where each has whole rails only, or a part of one; `None`: as they come."""
    if order.kind != "rail-optimised":
        return None
    domains, half = order.gpus // order.hb_size, max(1, order.radix // 2)
    if domains > half:
        return order.hb_size * math.ceil(domains / half)
    return math.ceil(order.hb_size / (half // domains))


def _billed(order: NetworkOrder) -> Bill:
    trees, endpoints = 1, order.gpus
    if order.kind == "rail-only":  # several rails are one tree if they fit
        domains = order.gpus // order.hb_size
        shared = min(order.hb_size, max(1, order.radix // domains))
        # The last switch may hold fewer rails; links are counted for all of them below.
        trees, endpoints = math.ceil(order.hb_size / shared), shared * domains
    one = tree(endpoints, order.radix, leaves=_rail_leaves(order))
    spares = order.spares * trees
    *below, top = (trees * count for count in one)
    links = (order.gpus,) * len(one)
    parts = counted(
        order.kind,
        switches=(*below, top + spares),
        links=links,
        copper_links=sum(links[: order.dac_tiers]),
        ports=(sum(below) + top + spares) * order.radix,
        price_ratio=order.price_ratio,
    )
    power, transceiver_w = None, order.transceiver_power_w
    if order.switch_port_power_w is not None and transceiver_w is not None:
        power = order.switch_port_power_w * parts["ports"] + transceiver_w * parts["transceivers"]
    return Bill(
        **parts,
        hb_size=order.hb_size,
        radix=order.radix,
        trees=trees,
        spare_switches=spares,
        power_w=power,
        saving_fraction=0.0,
        # Full leaves: the last one of a tree may hold fewer.
        endpoints_per_leaf=min(endpoints, order.radix // min(2, len(one))),
    )


def _notes(order: NetworkOrder, found: Bill, whole: Bill) -> list[str]:
    notes = []
    if order.kind != "clos" and found.relative_cost >= whole.relative_cost:
        notes.append(f"{order.kind} saves nothing here: {_why_nothing(order, found, whole)}")
    if order.kind == "rail-only" and found.switches > 1:
        notes.append("GPUs of two rails reach each other through their HB domain only")
    if order.gpus == order.hb_size:
        notes.append("one HB domain: scale-up links join all GPUs without this network")
    if found.switches == 1:
        notes.append("one switch is a single point of failure; see the alternatives")
    if order.spares:
        notes.append("spare switches lie ready: full bisection leaves no port to cable them")
    if order.dac_tiers >= found.tiers:
        notes.append("all links are copper: a few metres at most")
    return notes


def _why_nothing(order: NetworkOrder, found: Bill, whole: Bill) -> str:
    if found.switches == 1:
        return "one switch joins all rails"
    if order.kind == "rail-optimised":
        return "it is a Clos with its leaves sorted by rail"
    if found.tiers == whole.tiers:
        return f"each rail needs {found.tiers} tiers, as many as the Clos"
    return "rails leave more ports free than a tier less saves"


def _small(order: NetworkOrder) -> tuple[Alternative, ...]:
    if order.gpus > order.radix or order.gpus == order.hb_size:
        return ()
    gpus, rails = order.gpus, order.hb_size
    per_link = 0 if order.dac_tiers else 2
    found = [
        ("one switch", 1, gpus, "fewest parts; a single point of failure"),
        ("two switches", 2, gpus, "half of the rails on each: one may fail; any-to-any within it"),
        ("a switch a rail", rails, gpus, "no spine: rail-only; ready to grow"),
    ]
    if rails == 1:
        found = []
    if gpus == 2 * rails:
        note = "copper from NIC to NIC, rail by rail; cannot grow"
        found.append(("cables between two HB domains", 0, rails, note))
    return tuple(
        Alternative(
            name=name, switches=n, links=m, transceivers=per_link * m if n else 0, note=note
        )
        for name, n, m, note in found
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltTier:
    """
    Switches of one tier.

    Attributes:
        tier: name of the tier whose units the switches make.
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
    """Parts of a network as built, the spares not among its switches."""

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
    place, used = f"fabric.switches.{at.tier}.model", at.down + at.up
    one_of(switches, **{place: at.model})
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
