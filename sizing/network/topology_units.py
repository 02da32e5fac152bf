"""Free GPUs as a tree of units: the whole site, its pods and racks, down to HB domains."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError, NegativeAnswer
from minicluster.specs.checks import one_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minicluster.specs.topology import Inventory, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyUnit:
    """
    One unit of a tier.

    Attributes:
        tier: 0 for an HB domain.
        inner: units of the tier below; empty for an HB domain.
        gpus: free ones of an HB domain, (node, GPU of the node) each.
        first: number of its first GPU in the inventory's order.
    """

    tier: int
    inner: tuple[TopologyUnit, ...] = ()
    gpus: tuple[tuple[str, int], ...] = ()
    first: int = 0

    @property
    def free(self) -> int:
        """Free GPUs."""
        return len(self.gpus) if self.tier == 0 else sum(unit.free for unit in self.inner)

    def domains(self) -> Iterator[TopologyUnit]:
        """Yield its HB domains in order."""
        if self.tier == 0:
            yield self
        for unit in self.inner:
            yield from unit.domains()

    def atoms(self, gpus: int) -> int:
        """Count the groups of *gpus* that fit, none of them across HB domains."""
        return sum(unit.free // gpus for unit in self.domains())

    def at(self, tier: int) -> Iterator[TopologyUnit]:
        """Yield its units of a tier."""
        if self.tier == tier:
            yield self
        else:
            for unit in self.inner:
                yield from unit.at(tier)

    @property
    def widest_domain(self) -> int:
        """Free GPUs of the roomiest HB domain."""
        return max(unit.free for unit in self.domains())

    def units_of_gpus(self, tier: int) -> dict[tuple[str, int], int]:
        """Return the unit of a tier, by its `first`, of every free GPU."""
        return {
            gpu: unit.first
            for unit in self.at(tier)
            for domain in unit.domains()
            for gpu in domain.gpus
        }


def replica_tier(
    root: TopologyUnit,
    tiers: Sequence[str],
    shape: tuple[int, int],
    *,
    within: int | None,
    what: str = "replica",
) -> int | None:
    """
    Return the innermost tier of which a unit holds a whole replica; `None`: none does.

    Args:
        shape: GPUs of a group that is never cut, and groups of a replica.
        within: the widest tier that is allowed; `None`: any.
        what: what the message calls the replica.

    Raises:
        NegativeAnswer: the replica is wider than *within* allows; says by how many GPUs.
    """
    group, groups = shape
    tier = next(
        (t for t in range(root.tier + 1) if any(u.atoms(group) >= groups for u in root.at(t))), None
    )
    if tier is not None and within is not None and tier > within:
        best, gpus = max(unit.atoms(group) * group for unit in root.at(within)), group * groups
        raise NegativeAnswer(
            f"a {what} of {gpus} GPUs does not fit one {tiers[within]}: the roomiest has"
            f" {best} free in groups of TP{group}, {gpus - best} too few"
            f" (constraint: replica within {tiers[within]})"
        )
    return tier


def tp_parts(place: str, tp: int, root: TopologyUnit, tier: str, *, straddle: bool) -> int:
    """
    Return into how many equal groups TP is cut, each inside an HB domain: as few as can be.

    Args:
        place: the option that an error names.
        tier: name of the HB domains.

    Raises:
        InputError: TP leaves it without permission.
    """
    domain = root.widest_domain
    if tp > domain and not (straddle and domain):
        raise InputError(
            place, tp, f"at most the {domain} free GPUs of one {tier}",
            "--allow-tp-straddle permits it; every layer then waits for the network",
        )  # fmt: skip
    return next(parts for parts in range(-(-tp // domain), tp + 1) if tp % parts == 0)


def unit_tree(
    inventory: Inventory,
    *,
    spare_nodes: int = 0,
    spare_tier: str | None = None,
    gpus_per_hb_domain: int | None = None,
) -> TopologyUnit:
    """
    Return the free GPUs of an inventory as a tree; nodes that are down or spare have none.

    Args:
        spare_nodes: further nodes to keep free, the last ones that are `ok`.
        spare_tier: tier of whose every unit spares are kept; `None`: of the whole inventory.
        gpus_per_hb_domain: at most; a node with more has several domains. `None`: nodes have one.

    Raises:
        InputError: a tier that there is not, or more spares than nodes.
    """
    kept = _kept(inventory, spare_nodes, spare_tier)
    firsts = itertools.accumulate((node.gpus for node in inventory.nodes), initial=0)
    tiers = inventory.tiers or ("hb",)
    whole = _unit(len(tiers) - 1, list(zip(inventory.nodes, firsts, strict=False)), tiers, kept)
    widest = max(node.gpus for node in inventory.nodes)
    if gpus_per_hb_domain is None or gpus_per_hb_domain >= widest:
        return whole
    return _cut_domains(whole, gpus_per_hb_domain)


def _cut_domains(unit: TopologyUnit, size: int) -> TopologyUnit:
    if unit.tier > 1:
        return replace(unit, inner=tuple(_cut_domains(each, size) for each in unit.inner))
    parts = (
        TopologyUnit(tier=0, gpus=domain.gpus[start : start + size], first=domain.first + start)
        for domain in unit.inner
        for start in range(0, len(domain.gpus), size)
    )
    return replace(unit, inner=tuple(parts))


def _kept(inventory: Inventory, spare_nodes: int, spare_tier: str | None) -> set[str]:
    """Return the names of nodes without free GPUs: down, spare, or kept free now."""
    one_of(inventory.tiers, **{"--spare-tier": spare_tier})
    units: dict[str, list[str]] = {}
    for node in inventory.nodes:
        if node.state == "ok":
            unit = "" if spare_tier is None else node.units.get(spare_tier, "")
            units.setdefault(unit, []).append(node.name)
    short = next((unit for unit, names in units.items() if len(names) < spare_nodes), None)
    if short is not None:
        raise InputError(
            "--spare-nodes", spare_nodes, f"at most the {len(units[short])} nodes of a unit"
        )
    kept = {node.name for node in inventory.nodes if node.state != "ok"}
    for names in units.values():
        kept.update(names[len(names) - spare_nodes :])
    return kept


def _unit(
    tier: int, placed: Sequence[tuple[Node, int]], tiers: Sequence[str], kept: set[str]
) -> TopologyUnit:
    first = placed[0][1]
    if tier == 0:
        free = (node for node, _ in placed if node.name not in kept)
        gpus = tuple((node.name, gpu) for node in free for gpu in range(node.gpus))
        return TopologyUnit(tier=0, gpus=gpus, first=first)
    inner: dict[str, list[tuple[Node, int]]] = {}
    for node, at in placed:
        # A node that names no HB domain is one; those that name no wider unit are in one together.
        unit = node.units.get(tiers[tier - 1]) or (node.name if tier == 1 else "")
        inner.setdefault(unit, []).append((node, at))
    below = tuple(_unit(tier - 1, found, tiers, kept) for found in inner.values())
    return TopologyUnit(tier=tier, inner=below, first=first)
