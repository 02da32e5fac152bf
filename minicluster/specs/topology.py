"""Networks as tiers of units and as lists of nodes; bandwidths one way, per GPU."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from minicluster.errors import SET, Fault, InputError
from minicluster.specs.checks import Count, Fraction, NotNegative, Positive, Spec, choice

if TYPE_CHECKING:
    from collections.abc import Sequence


BANDWIDTH_UNITS = {"bytes_per_s": 1.0, "gbyte_per_s": 1e9, "gbit_per_s": 1e9 / 8}
"""Keys that may say a tier's bandwidth, and how many bytes/s one of each is."""
PLAUSIBLE = (1e7, 1e13)
"""Bytes/s of a GPU's link: outside, a unit was mistaken (80 Mb/s to 80 Tb/s)."""
BANDWIDTH_WAY_OUT = (
    "say bytes_per_s, gbyte_per_s (gigabytes) or gbit_per_s (gigabits) per GPU and one way;"
    " two_way = true where the number counts both"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec(Spec):
    """
    `[[tiers]]` of a cluster preset, from the inside out; the first is the HB domain.

    The bandwidth is what one GPU has towards others that it meets at this tier, in exactly one
    of three units; left out, it is the GPU's own of the catalog.

    Attributes:
        name: `hb`, `rack`, `pod`, `zone` or whatever the site calls it.
        gpus: inside one unit of this tier; a multiple of the tier before.
        gbit_per_s: as NICs and switches are sold.
        two_way: the number counts both directions, as NVLink is advertised; half of it is taken.
        efficiency_fraction: what large transfers achieve; left out: the GPU's own.
        latency_s: what a hop across this tier adds to one across the tier before.
        oversubscription: downlinks per uplink on the way into this tier, 1 or more; cumulative.
    """

    _TABLE: ClassVar[str] = "tiers.{0.name}"

    name: str
    gpus: Count
    bytes_per_s: Positive | None = None
    gbyte_per_s: Positive | None = None
    gbit_per_s: Positive | None = None
    two_way: bool = False
    efficiency_fraction: Fraction | None = None
    latency_s: NotNegative | None = None
    oversubscription: float = 1.0

    def _check(self) -> None:
        place = f"tiers.{self.name}"
        units = [key for key in BANDWIDTH_UNITS if getattr(self, key) is not None]
        if len(units) > 1:
            both = " and ".join(units)
            raise InputError(
                f"{place}: {both}", Fault("are given together"), "exactly one bandwidth"
            )
        if self.two_way and not units:
            raise InputError(
                f"{place}.two_way", SET, "no such key without a bandwidth in the same table"
            )
        if not self.oversubscription >= 1:
            expected = "1 or more: downlinks for each uplink"
            where = f"{place}.oversubscription"
            raise InputError(where, self.oversubscription, expected, "1:7 is written 7")
        bandwidth = self.one_way_bytes_per_s
        if bandwidth is not None and not PLAUSIBLE[0] <= bandwidth <= PLAUSIBLE[1]:
            raise InputError(
                f"{place}.{units[0]}", getattr(self, units[0]), "a link of a GPU", BANDWIDTH_WAY_OUT
            )

    @property
    def one_way_bytes_per_s(self) -> float | None:
        """Bandwidth of the file, one way, in bytes/s; `None`: the file has none."""
        for key, unit in BANDWIDTH_UNITS.items():
            value: float | None = getattr(self, key)
            if value is not None:
                return value * unit / (2 if self.two_way else 1)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """
    One tier with nothing left out.

    Attributes:
        gpus: inside one unit.
        bytes_per_s: of one GPU, one way, peak.
        efficiency_fraction: of it for large transfers.
        latency_s: of a hop between two GPUs that meet at this tier, all tiers below included.
        oversubscription: of all tiers up to this one together.
    """

    name: str
    gpus: int
    bytes_per_s: float
    efficiency_fraction: float
    latency_s: float
    oversubscription: float

    def achieved_bytes_per_s(self, sending_fraction: float = 1.0) -> float:
        """
        Return what a GPU achieves when *sending_fraction* of its unit sends across at once.

            B_j e_j / max(1, o_j x)      (docs/model.md, eq. F2)

        Uplinks are shared by the flows that cross, not by the GPUs that could.
        """
        shared = max(1.0, self.oversubscription * sending_fraction)
        return self.bytes_per_s * self.efficiency_fraction / shared


DOMAIN, NETWORK = "hb", "network"  # names of the tiers of a cluster that names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """
    Tiers from the HB domain outwards, the last of which holds every GPU.

    GPUs are numbered so that units are contiguous.
    """

    name: str
    gpus_per_node: int
    tiers: tuple[Tier, ...]

    @property
    def gpus(self) -> int:
        """GPUs of the whole network."""
        return self.tiers[-1].gpus

    def index(self, name: str) -> int:
        """Return which tier is called *name*, 0 for the HB domain, or refuse."""
        names = [tier.name for tier in self.tiers]
        if name not in names:
            raise InputError(f"topology {self.name}: tier", name, "one of " + ", ".join(names))
        return names.index(name)

    def units(self, tier: int) -> int:
        """Return how many units of a tier there are."""
        return self.gpus // self.tiers[tier].gpus

    def holding(self, gpus: int) -> int:
        """
        Return the innermost tier of which one unit holds *gpus* neighbours; 0 for the HB domain.

        Its latency and bandwidth are those between the first and the last of them
        (docs/model.md, eq. F3).
        """
        for index, tier in enumerate(self.tiers):
            if gpus <= tier.gpus:
                return index
        expected = f"at most the {self.gpus} that there are"
        raise InputError(f"topology {self.name}: GPUs", gpus, expected)

    def spans(self, group: int, stride: int = 1) -> tuple[int, ...]:
        """
        Return how a group spreads over the tiers.

            k_j = ⌈m_j/(k_1 … k_(j-1))⌉, m_j = min(n, ⌊g_j/stride⌋) members in a unit, all in the
            outermost      (docs/model.md, eq. F1)

        Args:
            group: n GPUs, *stride* apart, the first of them the first of a unit.
            stride: 1 for neighbours.

        Returns: One number a tier: members in an HB domain, HB domains in a unit of the next tier,
        and so on; their product is at least n.

        Raises InputError: the group is wider than the network.
        """
        if (group - 1) * stride >= self.gpus:
            where = f"topology {self.name}: group"
            expected = f"at most the {self.gpus} GPUs that there are"
            raise InputError(where, f"{group} GPUs, {stride} apart", expected)
        # Where the stride does not divide a unit, some groups straddle its edge: count those.
        members = [max(1, min(group, tier.gpus // stride)) for tier in self.tiers[:-1]]
        below, spans = 1, []
        for here in (*members, group):
            spans.append(math.ceil(here / below))
            below *= spans[-1]
        return tuple(spans)


def check_tiers(tiers: tuple[TierSpec, ...]) -> None:
    """Refuse tiers that do not nest, or of the same name."""
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise InputError("tiers.name", names, "a name of its own for each tier")
    for inner, outer in itertools.pairwise(tiers):
        if outer.gpus % inner.gpus or outer.gpus == inner.gpus:
            expected = f"a multiple of the {inner.gpus} GPUs of {inner.name}: sizes nest"
            raise InputError(f"tiers.{outer.name}.gpus", outer.gpus, expected)
    if tiers[0].oversubscription != 1:
        where = f"tiers.{tiers[0].name}.oversubscription"
        expected = "1: nothing is below the HB domain that could share its links"
        raise InputError(where, tiers[0].oversubscription, expected)


NUMBERED = re.compile(r"node-(\d+)")  # names of nodes in a cluster that lists none


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Spec):
    """
    One host.

    Attributes:
        name: as the cluster manager knows it.
        units: tier to unit, for example `{hb = "h0", rack = "r0", pod = "p0"}`; a tier that
            holds everything may be left out.
        rails: of its GPUs, in order; empty: 0, 1, 2 ….
    """

    _TABLE: ClassVar[str] = "nodes.{0.name}"

    name: str
    gpus: Count
    units: dict[str, str]
    rails: tuple[int, ...] = ()
    state: Annotated[str, choice("ok", "spare", "down")] = "ok"

    def _check(self) -> None:
        if self.rails and len(self.rails) != self.gpus:
            expected = f"{self.gpus}, one for each GPU"
            raise InputError(self._place("rails"), list(self.rails), expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """`[[nodes]]`: every host, in the order of its GPUs; overrides the sizes of *tiers*."""

    nodes: tuple[Node, ...]
    tiers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError("nodes", None, "at least one node")
        twice = [name for name, count in Counter(n.name for n in self.nodes).items() if count > 1]
        if twice:
            raise InputError("nodes.name", twice[0], "a name of its own for each node")
        for node in self.nodes:
            unknown = sorted(set(node.units) - set(self.tiers))
            if unknown:
                where, expected = f"nodes.{node.name}.units", "one of " + ", ".join(self.tiers)
                raise InputError(where, unknown[0], expected)
        self._check_nesting()

    def _check_nesting(self) -> None:
        parents: dict[tuple[str, str, str], str] = {}
        for node in self.nodes:
            units = [(tier, node.units[tier]) for tier in self.tiers if tier in node.units]
            for (tier, unit), (outer, outer_unit) in itertools.combinations(units, 2):
                seen = parents.setdefault((tier, unit, outer), outer_unit)
                if seen != outer_unit:
                    where = f"nodes.{node.name}.units.{outer}"
                    raise InputError(
                        where, outer_unit, f"{seen}: {tier} {unit} has other nodes there"
                    )

    def unit_gpus(self, tier: str) -> dict[str, int]:
        """Return the GPUs of each unit of a tier, nodes that are down left out."""
        gpus: Counter[str] = Counter()
        for node in self.nodes:
            gpus[node.units.get(tier, "")] += node.gpus if node.state != "down" else 0
        return dict(gpus)


def inventory_of(topology: Topology) -> Inventory:
    """Return the nodes of a topology that lists none."""
    sizes = [(tier.name, tier.gpus) for tier in topology.tiers]
    count = -(-topology.gpus // topology.gpus_per_node)
    return numbered_nodes(count, topology.gpus_per_node, sizes)


def numbered_nodes(
    count: int, gpus_per_node: int, tiers: Sequence[tuple[str, int | None]], *, first: int = 0
) -> Inventory:
    """
    Return nodes named `node-0` and so on, in units named by their numbers (`rack17`).

    *tiers* have the GPUs of a unit, from the inside out; `None`: one unit holds all.
    """
    nodes = []
    for number in range(first, first + count):
        gpu = number * gpus_per_node
        units = {name: f"{name}{gpu // size if size else 0}" for name, size in tiers}
        nodes.append(Node(name=f"node-{number}", gpus=gpus_per_node, units=units))
    return Inventory(nodes=tuple(nodes), tiers=tuple(name for name, _ in tiers))


def node_number(name: str) -> int | None:
    """Return the number of a node that `numbered_nodes` named; `None`: another name."""
    match = NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])
