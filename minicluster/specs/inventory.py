"""The nodes that there are, one by one, and which unit of each tier they are in."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.checks import STRICT, one_of, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.topology import Topology

STATES = ("ok", "spare", "down")

NUMBERED = re.compile(r"node-(\d+)")
"""Names of nodes that no list names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """
    One host.

    Attributes:
        name: as the cluster manager knows it.
        gpus: that it has.
        units: tier to unit, for example `{hb = "h0", rack = "r0", pod = "p0"}`; a tier that
            holds everything may be left out.
        rails: of its GPUs, in order; empty: 0, 1, 2 ….
        state: `ok`, `spare` or `down`.
    """

    __pydantic_config__ = STRICT

    name: str
    gpus: int
    units: dict[str, str]
    rails: tuple[int, ...] = ()
    state: str = "ok"

    def __post_init__(self) -> None:
        """Check count, state and rails."""
        positive(**{f"nodes.{self.name}.gpus": self.gpus})
        one_of(STATES, **{f"nodes.{self.name}.state": self.state})
        if self.rails and len(self.rails) != self.gpus:
            raise InputError(
                f"nodes.{self.name}.rails", list(self.rails), f"{self.gpus}, one for each GPU"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """
    `[[nodes]]`: every host; overrides the sizes of the tiers.

    Attributes:
        nodes: in the order in which GPUs are numbered.
        tiers: names from the inside out.
    """

    nodes: tuple[Node, ...]
    tiers: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Refuse duplicate nodes, unknown tiers, units that do not nest."""
        if not self.nodes:
            raise InputError("nodes", None, "at least one node")
        twice = [name for name, count in Counter(n.name for n in self.nodes).items() if count > 1]
        if twice:
            raise InputError("nodes.name", twice[0], "a name of its own for each node")
        for node in self.nodes:
            unknown = sorted(set(node.units) - set(self.tiers))
            if unknown:
                raise InputError(
                    f"nodes.{node.name}.units", unknown[0], "one of " + ", ".join(self.tiers)
                )
        self._check_nesting()

    def _check_nesting(self) -> None:
        """Refuse a unit whose nodes are in two units of a tier further out."""
        parents: dict[tuple[str, str, str], str] = {}
        for node in self.nodes:
            for depth, tier in enumerate(self.tiers):
                for outer in self.tiers[depth + 1 :]:
                    if tier not in node.units or outer not in node.units:
                        continue
                    key = (tier, node.units[tier], outer)
                    seen = parents.setdefault(key, node.units[outer])
                    if seen != node.units[outer]:
                        raise InputError(
                            f"nodes.{node.name}.units.{outer}",
                            node.units[outer],
                            f"{seen}: {tier} {node.units[tier]} has other nodes there",
                        )

    @property
    def gpus(self) -> int:
        """GPUs of the nodes that are `ok` or `spare`."""
        return sum(node.gpus for node in self.nodes if node.state != "down")

    def unit_gpus(self, tier: str) -> dict[str, int]:
        """Return the GPUs of each unit of a tier, nodes that are down left out."""
        found: Counter[str] = Counter()
        for node in self.nodes:
            found[node.units.get(tier, "")] += node.gpus if node.state != "down" else 0
        return dict(found)


def inventory_of(topology: Topology, gpus: int | None = None) -> Inventory:
    """
    Return the first nodes of a topology.

    Args:
        topology: sizes.
        gpus: how many to list, rounded up to whole nodes; `None`: all.

    """
    per_node = topology.gpus_per_node
    count = -(-(topology.gpus if gpus is None else gpus) // per_node)
    topology.holding(count * per_node)
    return numbered_nodes(count, per_node, [(tier.name, tier.gpus) for tier in topology.tiers])


def numbered_nodes(
    count: int, gpus_per_node: int, tiers: Sequence[tuple[str, int | None]], *, first: int = 0
) -> Inventory:
    """
    Return nodes named `node-0` and so on, in units named by their numbers (`rack17`).

    Args:
        count: of nodes.
        gpus_per_node: GPUs of each.
        tiers: from the inside out, each with the GPUs of a unit; `None`: one unit holds all.
        first: number of the first node.

    """
    nodes = []
    for number in range(first, first + count):
        gpu = number * gpus_per_node
        units = {name: f"{name}{gpu // size if size else 0}" for name, size in tiers}
        nodes.append(Node(name=node_name(number), gpus=gpus_per_node, units=units))
    return Inventory(nodes=tuple(nodes), tiers=tuple(name for name, _ in tiers))


def node_name(number: int) -> str:
    """Name a node that no list names."""
    return f"node-{number}"


def node_number(name: str) -> int | None:
    """Return the number of a node that `node_name` named; `None`: another name."""
    match = NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])
