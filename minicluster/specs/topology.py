"""A network as formulas take it: tiers from the inside out, nothing left out."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.inventory import Inventory
from minicluster.specs.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.cluster import ClusterSpec
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.tier import TierSpec

DOMAIN, NETWORK = "hb", "network"
"""Tiers of a cluster that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """
    Tiers from the HB domain outwards. GPUs are numbered so that units are contiguous.

    Attributes:
        name: of the cluster.
        gpus_per_node: GPUs that share a host.
        tiers: at least one; the last holds every GPU.
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

    def unit(self, gpu: int, tier: int) -> int:
        """Return the unit of a tier that a GPU is in."""
        return gpu // self.tiers[tier].gpus

    def meeting(self, gpus: Sequence[int]) -> int:
        """
        Return the innermost tier of which one unit holds all *gpus*; 0 for the HB domain.

        Its latency and bandwidth are those of their way (docs/model.md, eq. F3).
        """
        low, high = min(gpus), max(gpus)
        if low < 0 or high >= self.gpus:
            outside = low if low < 0 else high
            raise InputError(f"topology {self.name}: GPU", outside, f"0 to {self.gpus - 1}")
        return next(
            index for index, tier in enumerate(self.tiers) if low // tier.gpus == high // tier.gpus
        )

    def holding(self, gpus: int) -> int:
        """Return the innermost tier that *gpus* neighbours fit in."""
        for index, tier in enumerate(self.tiers):
            if gpus <= tier.gpus:
                return index
        raise InputError(
            f"topology {self.name}: GPUs", gpus, f"at most the {self.gpus} that there are"
        )

    def spans(self, group: int, stride: int = 1) -> tuple[int, ...]:
        """
        Say how a group spreads over the tiers.

            k_j = ⌈m_j/(k_1 … k_(j-1))⌉, m_j = min(n, ⌊g_j/stride⌋) members in a unit, all in the
            outermost      (docs/model.md, eq. F1)

        Args:
            group: n GPUs, *stride* apart, the first of them the first of a unit.
            stride: 1 for neighbours.

        Returns:
            One number a tier: members in an HB domain, HB domains in a unit of the next tier, and
            so on; their product is at least n.

        Raises:
            InputError: the group is wider than the network.

        """
        if (group - 1) * stride >= self.gpus:
            raise InputError(
                f"topology {self.name}: group",
                f"{group} GPUs, {stride} apart",
                f"at most the {self.gpus} GPUs that there are",
            )
        # Where the stride does not divide a unit, some groups straddle its edge: count those.
        members = [max(1, min(group, tier.gpus // stride)) for tier in self.tiers[:-1]]
        below, spans = 1, []
        for here in (*members, group):
            spans.append(math.ceil(here / below))
            below *= spans[-1]
        return tuple(spans)


def topology_of(cluster: ClusterSpec, gpu: GpuSpec) -> Topology:
    """
    Return the network of a cluster, what its file leaves out taken from the GPU.

    A cluster without tiers has two: its HB domain and one network without oversubscription.
    Where every node is listed, a tier is as wide as its widest unit in the list.

    Args:
        cluster: tiers, or sizes alone.
        gpu: bandwidths, efficiencies and the latency in the HB domain.

    Raises:
        InputError: neither the cluster nor the GPU has a number that is needed, or the HB domain
            is said to be faster than the GPU's own links.

    """
    found = [_domain(cluster, gpu)]
    for spec in cluster.tiers[1:]:
        found.append(_network(spec, found, cluster, gpu))
    if not cluster.tiers and cluster.max_gpus > cluster.gpus_per_hb_domain:
        found.append(_implied(cluster, gpu))
    listed = _as_listed(found, cluster)
    return Topology(name=cluster.name, gpus_per_node=cluster.gpus_per_node, tiers=tuple(listed))


def _as_listed(tiers: list[Tier], cluster: ClusterSpec) -> list[Tier]:
    """Return tiers with the sizes that the listed nodes give them."""
    if not cluster.nodes:
        return tiers
    listed = Inventory(nodes=cluster.nodes, tiers=tuple(tier.name for tier in tiers))
    return [replace(tier, gpus=max(listed.unit_gpus(tier.name).values())) for tier in tiers]


def check_tiers(tiers: tuple[TierSpec, ...], place: str) -> None:
    """Refuse tiers that do not nest, or of the same name."""
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise InputError(f"{place}.name", names, "a name of its own for each tier")
    for inner, outer in itertools.pairwise(tiers):
        if outer.gpus % inner.gpus or outer.gpus == inner.gpus:
            raise InputError(
                f"{place}.{outer.name}.gpus",
                outer.gpus,
                f"a multiple of the {inner.gpus} GPUs of {inner.name}: sizes nest",
            )
    for tier in tiers[:1]:
        if tier.oversubscription != 1:
            raise InputError(
                f"{place}.{tier.name}.oversubscription",
                tier.oversubscription,
                "1: nothing is below the HB domain that could share its links",
            )


def _domain(cluster: ClusterSpec, gpu: GpuSpec) -> Tier:
    """Return the HB domain."""
    spec = cluster.tiers[0] if cluster.tiers else None
    said = spec.one_way_bytes_per_s if spec else None
    own = gpu.scale_up_bytes_per_s
    if said is not None and own is not None and said > own * (1 + 1e-9):
        raise InputError(
            f"cluster {cluster.name}: tiers.{spec.name if spec else ''}",
            f"{said:.4g} bytes/s",
            f"at most the {own:.4g} bytes/s one way of {gpu.name}",
            "two_way = true where the number counts both directions",
        )
    efficiency = gpu.efficiency
    achieved = spec.efficiency_fraction if spec else None
    latency = spec.latency_s if spec else None
    if efficiency is not None:
        achieved = achieved or efficiency.scale_up_fraction
        latency = efficiency.collective_latency_s if latency is None else latency
    return Tier(
        name=spec.name if spec else DOMAIN,
        gpus=cluster.gpus_per_hb_domain,
        bytes_per_s=gpu.require("scale_up_bytes_per_s") if said is None else said,
        efficiency_fraction=_needed(achieved, cluster, "hb.efficiency_fraction"),
        latency_s=_needed(latency, cluster, "hb.latency_s"),
        oversubscription=1.0,
    )


def _network(spec: TierSpec, below: list[Tier], cluster: ClusterSpec, gpu: GpuSpec) -> Tier:
    """Return a tier beyond the HB domain."""
    said, achieved = spec.one_way_bytes_per_s, spec.efficiency_fraction
    if achieved is None and gpu.efficiency is not None:
        achieved = gpu.efficiency.scale_out_fraction
    latency = _needed(spec.latency_s, cluster, f"tiers.{spec.name}.latency_s")
    if len(below) > 1:
        latency += below[-1].latency_s
    return Tier(
        name=spec.name,
        gpus=spec.gpus,
        bytes_per_s=_needed(
            said or gpu.scale_out_bytes_per_s, cluster, f"tiers.{spec.name}.bytes_per_s"
        ),
        efficiency_fraction=_needed(achieved, cluster, f"tiers.{spec.name}.efficiency_fraction"),
        latency_s=latency,
        oversubscription=below[-1].oversubscription * spec.oversubscription,
    )


def _implied(cluster: ClusterSpec, gpu: GpuSpec) -> Tier:
    """Return the one network of a cluster that says no tiers."""
    domain = cluster.gpus_per_hb_domain
    achieved = gpu.efficiency.scale_out_fraction if gpu.efficiency else None
    return Tier(
        name=NETWORK,
        gpus=math.ceil(cluster.max_gpus / domain) * domain,
        bytes_per_s=_needed(
            cluster.scale_out_bytes_per_s or gpu.scale_out_bytes_per_s,
            cluster,
            "scale_out_bytes_per_s",
        ),
        efficiency_fraction=_needed(achieved, cluster, "efficiency.scale_out_fraction"),
        latency_s=_needed(cluster.scale_out_latency_s, cluster, "scale_out_latency_s"),
        oversubscription=1.0,
    )


def _needed(value: float | None, cluster: ClusterSpec, key: str) -> float:
    """Return a number, or refuse where there is none."""
    if value is None:
        raise InputError(
            f"cluster {cluster.name}: {key}", None, "a number of the cluster or its GPU"
        )
    return value
