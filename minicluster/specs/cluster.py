"""The machines that may be used: nodes of equal GPUs, and the network that joins them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Positive, Spec
from minicluster.specs.fabric import FabricSpec, FailureSpec
from minicluster.specs.gpu import GpuSpec, NumberSource
from minicluster.specs.topology import (
    DOMAIN,
    NETWORK,
    Inventory,
    Node,
    Tier,
    TierSpec,
    Topology,
    check_tiers,
    node_number,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(Spec):
    """
    Nodes of equal GPUs.

    Attributes:
        gpus_per_hb_domain: GPUs joined by scale-up links; TP beyond it crosses the network.
        scale_out_bytes_per_s: network per GPU, one direction; `None`: the GPU's own entry.
        tiers: the network from the HB domain outwards; empty: one network around all domains.
        pools_meet_in: tier within which prefill and decode replicas are placed; `None`: the
            innermost one that holds max_gpus.
        nodes: every host; empty: as many as the tiers have room for, all alike.
    """

    name: str
    gpu: str
    gpus_per_node: Count
    gpus_per_hb_domain: Count
    max_gpus: Count
    scale_out_bytes_per_s: Positive | None = None
    scale_out_latency_s: NotNegative | None = None
    tiers: tuple[TierSpec, ...] = ()
    pools_meet_in: str | None = None
    fabric: FabricSpec | None = None
    failures: FailureSpec | None = None
    nodes: tuple[Node, ...] = ()
    sources: tuple[NumberSource, ...] = ()

    def _check(self) -> None:
        if self.gpus_per_hb_domain % self.gpus_per_node and (
            self.gpus_per_node % self.gpus_per_hb_domain
        ):
            expected = f"a multiple or a divisor of gpus_per_node = {self.gpus_per_node}"
            raise InputError("cluster.gpus_per_hb_domain", self.gpus_per_hb_domain, expected)
        if self.tiers:
            self._check_network()
        elif self.pools_meet_in is not None:
            raise InputError(
                "cluster.pools_meet_in", self.pools_meet_in, "no such key without [[tiers]]"
            )
        if self.nodes:
            Inventory(nodes=self.nodes, tiers=tuple(name for name, _ in self.tier_sizes))

    @property
    def tier_sizes(self) -> tuple[tuple[str, int | None], ...]:
        """Names of the tiers from the HB domain outwards, with the GPUs of a unit; `None`: all."""
        if self.tiers:
            return tuple((tier.name, tier.gpus) for tier in self.tiers)
        return ((DOMAIN, self.gpus_per_hb_domain), (NETWORK, None))

    def hb_domain(self, node: str) -> int | None:
        """Return the number of the HB domain that a node (its first GPU) is in; `None`: unknown."""
        if self.nodes:
            inner = self.tier_sizes[0][0]
            domains = {
                node_of_list.name: node_of_list.units.get(inner, node_of_list.name)
                for node_of_list in self.nodes
            }
            numbers = {name: n for n, name in enumerate(dict.fromkeys(domains.values()))}
            return numbers[domains[node]] if node in domains else None
        number = node_number(node)
        nodes = max(1, self.gpus_per_hb_domain // self.gpus_per_node)
        return None if number is None else number // nodes

    def with_nodes(self, gpus_per_node: int, gpus_per_hb_domain: int) -> ClusterSpec:
        """Return the cluster with other nodes; tiers describe the old ones and are left out."""
        if (gpus_per_node, gpus_per_hb_domain) == (self.gpus_per_node, self.gpus_per_hb_domain):
            return self
        return replace(
            self,
            gpus_per_node=gpus_per_node,
            gpus_per_hb_domain=gpus_per_hb_domain,
            tiers=(),
            pools_meet_in=None,
            nodes=(),
        )

    def _check_network(self) -> None:
        check_tiers(self.tiers)
        inner, outer = self.tiers[0], self.tiers[-1]
        if inner.gpus != self.gpus_per_hb_domain:
            raise InputError(
                f"tiers.{inner.name}.gpus",
                inner.gpus,
                f"gpus_per_hb_domain = {self.gpus_per_hb_domain}: the first tier is the HB domain",
            )
        if self.max_gpus > outer.gpus:
            raise InputError(
                "cluster.max_gpus", self.max_gpus, f"at most the {outer.gpus} GPUs of {outer.name}"
            )
        for key in ("scale_out_bytes_per_s", "scale_out_latency_s"):
            if getattr(self, key) is not None:
                expected = "no such key beside [[tiers]], which give it"
                raise InputError(f"cluster.{key}", getattr(self, key), expected)
        self._check_names({*(tier.name for tier in self.tiers), "node"})

    def _check_names(self, tier_names: set[str]) -> None:
        used = {"cluster.pools_meet_in": self.pools_meet_in}
        if self.fabric is not None:
            used |= {f"fabric.switches.{at.tier}": at.tier for at in self.fabric.switches}
        if self.failures is not None:
            used |= {f"failures.domains.{name}": name for name in self.failures.domains}
        for place, name in used.items():
            if name is not None and name not in tier_names:
                raise InputError(place, name, "one of " + ", ".join(sorted(tier_names)))


def topology_of(cluster: ClusterSpec, gpu: GpuSpec) -> Topology:
    """
    Return the network of a cluster, what its file leaves out taken from the GPU.

    A cluster without tiers has two: its HB domain and one network without oversubscription.
    Where every node is listed, a tier is as wide as its widest unit in the list.

    Raises InputError: neither the cluster nor the GPU has a number that is needed, or the HB domain
    is said to be faster than the GPU's own links.
    """
    inner, *outer = cluster.tiers or _implied(cluster)
    tiers = [_domain(inner, cluster, gpu)]
    for spec in outer:
        tiers.append(_network(spec, tiers, cluster, gpu))
    if cluster.nodes:
        listed = Inventory(nodes=cluster.nodes, tiers=tuple(tier.name for tier in tiers))
        tiers = [replace(t, gpus=max(listed.unit_gpus(t.name).values())) for t in tiers]
    return Topology(name=cluster.name, gpus_per_node=cluster.gpus_per_node, tiers=tuple(tiers))


def _implied(cluster: ClusterSpec) -> tuple[TierSpec, ...]:
    size = cluster.gpus_per_hb_domain
    domain = TierSpec(name=DOMAIN, gpus=size)
    if cluster.max_gpus <= size:
        return (domain,)
    network = TierSpec(
        name=NETWORK,
        gpus=math.ceil(cluster.max_gpus / size) * size,
        bytes_per_s=cluster.scale_out_bytes_per_s,
        latency_s=cluster.scale_out_latency_s,
    )
    return (domain, network)


def _domain(spec: TierSpec, cluster: ClusterSpec, gpu: GpuSpec) -> Tier:
    bandwidth, own = spec.one_way_bytes_per_s, gpu.scale_up_bytes_per_s
    if bandwidth is not None and own is not None and bandwidth > own * (1 + 1e-9):
        raise InputError(
            f"cluster {cluster.name}: tiers.{spec.name}",
            f"{bandwidth:.4g} bytes/s",
            f"at most the {own:.4g} bytes/s one way of {gpu.name}",
            "two_way = true where the number counts both directions",
        )
    achieved, latency = spec.efficiency_fraction, spec.latency_s
    if gpu.efficiency is not None:
        achieved = achieved or gpu.efficiency.scale_up_fraction
        latency = gpu.efficiency.collective_latency_s if latency is None else latency
    return Tier(
        name=spec.name,
        gpus=spec.gpus,
        bytes_per_s=gpu.require("scale_up_bytes_per_s") if bandwidth is None else bandwidth,
        efficiency_fraction=_needed(achieved, cluster, "hb.efficiency_fraction"),
        latency_s=_needed(latency, cluster, "hb.latency_s"),
        oversubscription=1.0,
    )


def _network(spec: TierSpec, below: list[Tier], cluster: ClusterSpec, gpu: GpuSpec) -> Tier:
    place = f"tiers.{spec.name}." if cluster.tiers else "scale_out_"
    bandwidth, achieved = spec.one_way_bytes_per_s, spec.efficiency_fraction
    if achieved is None and gpu.efficiency is not None:
        achieved = gpu.efficiency.scale_out_fraction
    latency = _needed(spec.latency_s, cluster, f"{place}latency_s")
    return Tier(
        name=spec.name,
        gpus=spec.gpus,
        bytes_per_s=_needed(bandwidth or gpu.scale_out_bytes_per_s, cluster, f"{place}bytes_per_s"),
        efficiency_fraction=_needed(achieved, cluster, f"{place}efficiency_fraction"),
        latency_s=latency + (below[-1].latency_s if len(below) > 1 else 0.0),
        oversubscription=below[-1].oversubscription * spec.oversubscription,
    )


def _needed(value: float | None, cluster: ClusterSpec, key: str) -> float:
    if value is None:
        where = f"cluster {cluster.name}: {key}"
        expected = "a number in the file of the cluster or of its GPU"
        way_out = "name a cluster like yours: cluster.preset beside your cluster.gpu, or --cluster"
        raise InputError(where, None, expected, way_out)
    return value
