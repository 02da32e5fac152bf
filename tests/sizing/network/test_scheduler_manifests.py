"""What schedulers are told: complete, and of the form that their own schemas ask for."""

from __future__ import annotations

import re
from typing import Any

from minicluster.plan import NODE_LABEL
from minicluster.specs.topology import Inventory, Node
from sizing.network import scheduler_manifests
from sizing.network.gpu_groups import GpuGroup, PoolRequest
from sizing.network.pools import PoolRules, place_pools
from sizing.network.ranks import Degrees, place_ranks
from sizing.network.topology_units import unit_tree
from tests.sizing.sites import site

Groups = tuple[GpuGroup, ...]

NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
LABEL = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
"""Names and label keys as the CRDs of Volcano (2026-08) and Kueue (v1beta2, 2026-08) take them."""


def placed(inventory: Inventory, prefill: tuple[int, int, int], pp: int = 1) -> Groups:
    """Place prefill of so many replicas, TP and stages beside one decode replica of TP8."""
    replicas, tp, stages = prefill
    requests = [
        PoolRequest(role="prefill", replicas=replicas, tp=tp, pp=stages),
        PoolRequest(role="decode", replicas=1, tp=8, pp=pp),
    ]
    rules = PoolRules(seconds_per_byte=(1.0, 4.0, 8.0), pair_bytes_per_s=1.0)
    return place_pools(requests, unit_tree(inventory), inventory.tiers, rules).groups


def narrow(inventory: Inventory) -> Groups:
    return placed(inventory, (2, 4, 1))


def wide(inventory: Inventory) -> Groups:
    return placed(inventory, (1, 8, 2), pp=2)


def test_ray_bundles_hold_all_gpus() -> None:
    """One selector a bundle, each of a node that has the label."""
    inventory = site([8, 8, 4, 4])
    made = scheduler_manifests.ray(inventory, narrow(inventory))
    groups = made["placement_groups"]

    assert sum(bundle["GPU"] for group in groups for bundle in group["bundles"]) == 16
    assert all(len(g["bundles"]) == len(g["bundle_label_selector"]) for g in groups)
    assert {group["strategy"] for group in groups} == {"STRICT_PACK"}
    selected = {s[NODE_LABEL] for g in groups for s in g["bundle_label_selector"]}
    assert selected == set(made["node_labels"])
    several = scheduler_manifests.ray(site([8] * 4), wide(site([8] * 4)))["placement_groups"]
    assert [(group["strategy"], len(group["bundles"])) for group in several] == [("PACK", 2)] * 2


def test_volcano_objects_keep_to_their_schema() -> None:
    """HyperNodes of every unit used, members of the tier below; one policy a role."""
    inventory = site([8] * 4)
    for own, tier, pods in ((narrow(inventory), 1, 1), (wide(inventory), 2, 2)):
        made = scheduler_manifests.volcano(inventory, own)
        known: set[str] = {node.name for node in inventory.nodes}
        for node in made["hyperNodes"]:
            assert set(node) == {"apiVersion", "kind", "metadata", "spec"}
            assert (node["apiVersion"], node["kind"]) == (
                "topology.volcano.sh/v1alpha1", "HyperNode",
            )  # fmt: skip
            assert NAME.match(node["metadata"]["name"])
            spec = node["spec"]
            assert spec["members"]
            for member in spec["members"]:
                assert member["type"] == ("Node" if spec["tier"] == 1 else "HyperNode")
                assert member["selector"]["exactMatch"]["name"] in known
            known.add(node["metadata"]["name"])
        check_pod_group(made["podGroup"], tier, pods)


def check_pod_group(group: dict[str, Any], tier: int, pods: int) -> None:
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    policies = group["spec"]["subGroupPolicy"]
    assert set(group["spec"]) == {"minMember", "subGroupPolicy"}
    assert group["spec"]["minMember"] == sum(
        policy["subGroupSize"] * policy["minSubGroups"] for policy in policies
    )
    for policy in policies:
        assert set(policy) == {"name", "labelSelector", "matchLabelKeys", "subGroupSize",
                               "minSubGroups", "networkTopology"}  # fmt: skip
        assert policy["networkTopology"] == {"mode": "hard", "highestTierAllowed": tier}
        assert policy["subGroupSize"] == pods
        assert all(LABEL.match(key) for key in policy["matchLabelKeys"])


def test_kueue_objects_keep_to_their_schema() -> None:
    """Levels from the outside in, unique, hosts last; slices as wide as a replica."""
    inventory = site([8] * 4)
    for own, level, pods in ((narrow(inventory), "hb", 1), (wide(inventory), "rack", 2)):
        made = scheduler_manifests.kueue(inventory, own)
        levels = [each["nodeLabel"] for each in made["spec"]["levels"]]
        assert made["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        assert len(set(levels)) == len(levels) <= 16
        assert all(LABEL.match(each) for each in levels)
        assert levels[-1] == "kubernetes.io/hostname"
        for pod_set in made["podSets"].values():
            notes = pod_set["annotations"]
            required = notes["kueue.x-k8s.io/podset-slice-required-topology"]
            assert required == f"minicluster.dev/{level}"
            assert int(notes["kueue.x-k8s.io/podset-slice-size"]) == pods
            assert pod_set["count"] % pods == 0
            assert notes["kueue.x-k8s.io/podset-preferred-topology"] in levels


def test_slurm_topology_nests() -> None:
    """Every unit is a switch of its own name; leaves list nodes, the others their children."""
    text = scheduler_manifests.slurm(site([8] * 4))
    assert text.startswith("- topology: minicluster\n  cluster_default: true\n  tree:\n")
    assert "- switch: hb-h0\n        nodes: n0" in text
    assert "- switch: rack-r-1\n        children: hb-h[2-3]" in text
    named = re.findall(r"switch: (\S+)", text)
    assert len(set(named)) == len(named)
    assert (
        scheduler_manifests.ranged([f"node{i}" for i in range(16)] + ["node20"]) == "node[0-15,20]"
    )


def test_units_of_two_tiers_with_one_name_are_two_switches() -> None:
    node = Node(name="n0", gpus=8, units={"hb": "a", "rack": "a", "pod": "a"})
    inventory = Inventory(nodes=(node,), tiers=("hb", "rack", "pod"))
    named = re.findall(r"switch: (\S+)", scheduler_manifests.slurm(inventory))
    assert named == ["hb-a", "rack-a", "pod-a"]


def test_rank_file_has_every_rank() -> None:
    """Ranks count tensor slices first, replicas last."""
    inventory = site([8, 8, 8, 8])
    job = place_ranks(Degrees(tp=4, pp=2, dp=3), unit_tree(inventory), inventory.tiers)
    head, *lines = scheduler_manifests.rank_file(job).splitlines()

    assert head == "rank node gpu tp cp pp dp"
    assert [line.split()[0] for line in lines] == [str(rank) for rank in range(24)]
    assert lines[13].split()[3:] == ["1", "0", "1", "1"]
