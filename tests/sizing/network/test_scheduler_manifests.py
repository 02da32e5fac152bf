"""What schedulers are told: complete, and of the form that their own schemas ask for."""

from __future__ import annotations

import re

import pytest

from minicluster.plan import NODE_LABEL
from minicluster.specs.topology import Inventory, Node
from sizing.network import scheduler_manifests
from sizing.network.gpu_groups import GpuGroup, PoolRequest
from sizing.network.pools import PoolRules, place_pools
from sizing.network.ranks import Degrees, place_ranks
from sizing.network.topology_units import unit_tree
from tests.sizing.sites import site

NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
LABEL = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
"""Names and label keys as the CRDs of Volcano (2026-08) and Kueue (v1beta2, 2026-08) take them."""

SITE = site([8] * 4)


def placed(stages: int) -> tuple[GpuGroup, ...]:
    """Place two prefill replicas of TP4 and a decode replica of TP8, or one of TP8 PP2 each."""
    prefill = {"replicas": 2, "tp": 4} if stages == 1 else {"replicas": 1, "tp": 8}
    requests = [
        PoolRequest(role="prefill", pp=stages, **prefill),
        PoolRequest(role="decode", replicas=1, tp=8, pp=stages),
    ]
    rules = PoolRules(seconds_per_byte=(1.0, 4.0, 8.0), pair_bytes_per_s=1.0)
    return place_pools(requests, unit_tree(SITE), SITE.tiers, rules).groups


STAGES = pytest.mark.parametrize(("stages", "tier"), [(1, 1), (2, 2)])
"""Nodes of a replica, and the tier that holds it: an HB domain, or a rack of two."""


@STAGES
def test_ray_bundles_hold_all_gpus(stages: int, tier: int) -> None:  # noqa: ARG001
    """One selector a bundle, each of a node that has the label; a bundle a node of a replica."""
    made = scheduler_manifests.ray(SITE, placed(stages))
    groups = made["placement_groups"]
    bundles = [bundle["GPU"] for group in groups for bundle in group["bundles"]]
    assert sum(bundles) == 16 * stages
    strategy = "STRICT_PACK" if stages == 1 else "PACK"
    assert {(group["strategy"], len(group["bundles"])) for group in groups} == {(strategy, stages)}
    assert all(len(g["bundles"]) == len(g["bundle_label_selector"]) for g in groups)
    selected = {s[NODE_LABEL] for g in groups for s in g["bundle_label_selector"]}
    assert selected == set(made["node_labels"])


@STAGES
def test_volcano_objects_keep_to_their_schema(stages: int, tier: int) -> None:
    """HyperNodes of every unit used, members of the tier below; one policy a role."""
    made = scheduler_manifests.volcano(SITE, placed(stages))
    known = {node.name for node in SITE.nodes}
    for node in made["hyperNodes"]:
        assert (node["apiVersion"], node["kind"]) == ("topology.volcano.sh/v1alpha1", "HyperNode")
        assert set(node) == {"apiVersion", "kind", "metadata", "spec"}
        assert NAME.match(node["metadata"]["name"])
        members = node["spec"]["members"]
        below = "Node" if node["spec"]["tier"] == 1 else "HyperNode"
        assert {member["type"] for member in members} == {below}
        assert {member["selector"]["exactMatch"]["name"] for member in members} <= known
        known.add(node["metadata"]["name"])
    group = made["podGroup"]
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert set(group["spec"]) == {"minMember", "subGroupPolicy"}
    policies = group["spec"]["subGroupPolicy"]
    pods = sum(policy["subGroupSize"] * policy["minSubGroups"] for policy in policies)
    assert group["spec"]["minMember"] == pods
    for policy in policies:
        assert set(policy) == {"name", "labelSelector", "matchLabelKeys", "subGroupSize",
                               "minSubGroups", "networkTopology"}  # fmt: skip
        assert policy["networkTopology"] == {"mode": "hard", "highestTierAllowed": tier}
        assert policy["subGroupSize"] == stages
        assert all(LABEL.match(key) for key in policy["matchLabelKeys"])


@STAGES
def test_kueue_objects_keep_to_their_schema(stages: int, tier: int) -> None:
    """Levels from the outside in, unique, hosts last; slices as wide as a replica."""
    made = scheduler_manifests.kueue(SITE, placed(stages))
    levels = [each["nodeLabel"] for each in made["spec"]["levels"]]
    assert made["apiVersion"] == "kueue.x-k8s.io/v1beta2"
    assert len(set(levels)) == len(levels) <= 16
    assert all(LABEL.match(each) for each in levels)
    assert levels[-1] == "kubernetes.io/hostname"
    for pod_set in made["podSets"].values():
        notes = pod_set["annotations"]
        required = notes["kueue.x-k8s.io/podset-slice-required-topology"]
        assert required == f"minicluster.dev/{SITE.tiers[tier - 1]}"
        assert int(notes["kueue.x-k8s.io/podset-slice-size"]) == stages
        assert pod_set["count"] % stages == 0
        assert notes["kueue.x-k8s.io/podset-preferred-topology"] in levels


def test_slurm_topology_nests() -> None:
    """Every unit is a switch of its own name; leaves list nodes, the others their children."""
    text = scheduler_manifests.slurm(SITE)
    assert text.startswith("- topology: minicluster\n  cluster_default: true\n  tree:\n")
    assert "- switch: hb-h0\n        nodes: n0" in text
    assert "- switch: rack-r-1\n        children: hb-h[2-3]" in text
    same = Node(name="n0", gpus=8, units={"hb": "a", "rack": "a", "pod": "a"})
    alike = scheduler_manifests.slurm(Inventory(nodes=(same,), tiers=("hb", "rack", "pod")))
    assert re.findall(r"switch: (\S+)", alike) == ["hb-a", "rack-a", "pod-a"]
    nodes = [*(f"node{i}" for i in range(16)), "node20", "node007"]
    assert scheduler_manifests.ranged(nodes) == "node007,node[0-15,20]"


def test_rank_file_has_every_rank() -> None:
    """Ranks count tensor slices first, replicas last."""
    job = place_ranks(Degrees(tp=2, cp=2, pp=2, dp=3), unit_tree(SITE), SITE.tiers)
    head, *lines = scheduler_manifests.rank_file(job).splitlines()
    assert head == "rank node gpu tp cp pp dp"
    assert [line.split()[0] for line in lines] == [str(rank) for rank in range(24)]
    assert lines[13].split()[3:] == ["1", "0", "1", "1"]
    assert lines[11].split()[3:] == ["1", "1", "0", "1"]
