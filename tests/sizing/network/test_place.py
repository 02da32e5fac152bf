"""Placement: constraints hold, the bound is a bound, and schedulers are told of it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError, NegativeAnswer
from minicluster.plan import NODE_LABEL
from minicluster.specs.topology import Inventory, Node
from sizing.network import scheduler_manifests
from sizing.network.gpu_groups import PoolRequest
from sizing.network.pools import PoolPlan, PoolRules, place_pools
from sizing.network.ranks import Degrees, RankRules, place_ranks
from sizing.network.topology_units import unit_tree
from tests.sizing.conftest import Sizing

PRICES = (1.0, 4.0, 8.0, 20.0)
"""Seconds per byte of four tiers; only their order matters here."""
TIERS = ("hb", "rack", "pod")
COUNTS = st.tuples(st.integers(1, 3), st.integers(1, 2))


def site(domains: list[int]) -> Inventory:
    """Return nodes with the given GPUs, an HB domain each, two to a rack."""
    nodes = tuple(
        Node(name=f"n{i}", gpus=gpus, units={"hb": f"h{i}", "rack": f"R_{i // 2}"})
        for i, gpus in enumerate(domains)
    )
    return Inventory(nodes=nodes, tiers=TIERS)


@st.composite
def sites(draw: st.DrawFn) -> Inventory:
    return site([4, *draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=4))])


@given(inventory=sites(), tp=st.sampled_from([1, 2, 4]), pp=st.integers(1, 3), dp=st.integers(1, 6))
def test_ranks_respect_constraints_and_the_bound(
    inventory: Inventory, tp: int, pp: int, dp: int
) -> None:
    """TP stays inside a domain, every GPU is used once, cuts are at least the bound."""
    try:
        found = place_ranks(Degrees(tp=tp, pp=pp, dp=dp), unit_tree(inventory), inventory.tiers)
    except NegativeAnswer as error:
        assert "GPUs" in str(error)  # noqa: PT017
        return

    domain = {node.name: node.units["hb"] for node in inventory.nodes}
    assert len(found.ranks) == len(set(found.ranks)) == tp * pp * dp
    for start in range(0, len(found.ranks), tp):
        assert len({domain[node] for node, _ in found.ranks[start : start + tp]}) == 1
    assert all(cut.bound <= cut.ring_edges <= cut.ring for cut in found.cuts)


def pooled(
    inventory: Inventory,
    counts: tuple[int, int],
    widths: tuple[int, int],
    *,
    stages: int = 1,
    **rules: object,
) -> PoolPlan:
    requests = [
        PoolRequest(role=role, replicas=n, tp=width, pp=stages)
        for role, n, width in zip(("prefill", "decode"), counts, widths, strict=True)
    ]
    prices = PRICES[: len(inventory.tiers)]
    kept = PoolRules(seconds_per_byte=prices, pair_bytes_per_s=1.0, **rules)
    return place_pools(requests, unit_tree(inventory), inventory.tiers, kept)


def enumerated(
    inventory: Inventory, counts: tuple[int, int], widths: tuple[int, int]
) -> float | None:
    """Return the least cost of all placements, tried one by one; `None` if none fits."""
    nodes = inventory.nodes
    places = range(len(nodes))

    def price(a: int, b: int) -> float:
        if a == b:
            return PRICES[0]
        return PRICES[1] if nodes[a].units["rack"] == nodes[b].units["rack"] else PRICES[2]

    costs = []
    for first, second in itertools.product(
        *(itertools.combinations_with_replacement(places, count) for count in counts)
    ):
        taken = [first.count(i) * widths[0] + second.count(i) * widths[1] for i in places]
        if all(gpus <= node.gpus for gpus, node in zip(taken, nodes, strict=True)):
            costs.append(sum(price(a, b) for a in first for b in second))
    return min(costs, default=None)


@settings(max_examples=40)
@given(
    inventory=sites(),
    counts=COUNTS,
    widths=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([2, 4])),
)
def test_pools_are_placed_as_well_as_any_enumeration(
    inventory: Inventory, counts: tuple[int, int], widths: tuple[int, int]
) -> None:
    """The exact search costs its bound and the least of all; the other one is between them."""
    least = enumerated(inventory, counts, widths)
    with pytest.MonkeyPatch.context() as patch:
        try:
            exact = pooled(inventory, counts, widths)
        except NegativeAnswer:
            assert least is None
            return
        patch.setattr("sizing.network.gpu_groups.MOST_GROUPS", 0)
        packed_only = pooled(inventory, counts, widths)
        patch.setattr("sizing.network.pools.WORK_LIMIT", 0)
        try:
            searched = pooled(inventory, counts, widths)
        except NegativeAnswer:  # filled in the order of the tree, groups may not fit
            searched = exact

    assert least is not None
    assert exact.optimal
    assert exact.cost == pytest.approx(least)
    assert searched.bound <= least * (1 + 1e-9) <= searched.cost * (1 + 2e-9)
    used = [gpu for group in exact.groups for gpu in group.gpus]
    assert len(used) == len(set(used)) == counts[0] * widths[0] + counts[1] * widths[1]
    # Alignment moves no group out of its domain, and brings no fewer bytes onto one rail.
    assert exact.cost == packed_only.cost
    assert exact.rail_aligned_fraction >= packed_only.rail_aligned_fraction
    for here, there in zip(exact.groups, packed_only.groups, strict=True):
        assert {node for node, _ in here.gpus} == {node for node, _ in there.gpus}


def test_rules_of_pools() -> None:
    """Spread is kept or said to be impossible; pairs within a rack are hard."""
    found = pooled(site([8, 8, 8, 8]), (2, 2), (4, 4), spread_tier=1, spread_least=2)
    assert [units["rack"] for units in found.spread.values()] == [2, 2]
    assert not found.warnings
    narrow = pooled(site([8, 8]), (2, 2), (4, 4), spread_tier=1, spread_least=2)
    assert narrow.warnings[0].startswith("not spread over 2 units of rack")
    near = pooled(site([8, 8, 8, 8]), (2, 1), (4, 8), pairs_within=1)
    assert near.meeting_fraction["pod"] == 0
    # Narrow groups stride over the rails: half is the most that one NIC a rank allows.
    assert near.rail_aligned_fraction == 0.5
    assert pooled(site([8, 8]), (2, 1), (4, 4)).rail_aligned_fraction == 1.0


def test_spares_are_kept_free() -> None:
    inventory = site([8] * 4)
    root = unit_tree(inventory, spare_nodes=1, spare_tier="rack")
    assert root.free == 16
    down = Node(name="x", gpus=8, units={"hb": "hx", "rack": "r9"}, state="down")
    assert unit_tree(Inventory(nodes=(*inventory.nodes, down), tiers=inventory.tiers)).free == 32
    broken = Node(name="x", gpus=8, units={"hb": "hx", "rack": "R_1"}, state="down")
    beside = Inventory(nodes=(*inventory.nodes, broken), tiers=inventory.tiers)
    assert unit_tree(beside, spare_nodes=1, spare_tier="rack").free == 16
    with pytest.raises(InputError, match="at most the 2 nodes"):
        unit_tree(inventory, spare_nodes=3, spare_tier="rack")


@pytest.mark.parametrize(
    ("degrees", "rules", "message"),
    [
        ({"tp": 16}, {}, "--allow-tp-straddle"),
        ({"tp": 8, "dp": 3}, {}, "8 GPUs too few"),
        ({"tp": 8, "pp": 3}, {}, "needs 24 GPUs, 16 are free: 8 too few"),
        ({"tp": 8, "pp": 2}, {"replica_within": 0}, r"8 too few \(constraint: replica within hb"),
        ((16, 8), {}, "need 24 GPUs, 16 are free: 8 too few"),
        ((8, 16), {"replica_within": 0}, "a decode replica .* not fit one hb"),
        ((8, 8), {"pairs_within": 0}, r"16 GPUs, 8 are free: 8 too few.*within one hb"),
    ],
)
def test_refusals_say_how_many_and_why(
    degrees: dict[str, int] | tuple[int, int], rules: dict[str, Any], message: str
) -> None:
    """Ranks of degrees, or a prefill and a decode replica of two widths."""

    def place() -> object:
        if isinstance(degrees, tuple):
            return pooled(site([8, 8]), (1, 1), degrees, **rules)
        root = unit_tree(site([8, 8]))
        return place_ranks(Degrees(**degrees), root, TIERS, RankRules(**rules))

    with pytest.raises((InputError, NegativeAnswer), match=message):
        place()


def test_command(sizing: Sizing, tmp_path: Path) -> None:
    twice = tmp_path / "nodes.toml"
    twice.write_text('[[nodes]]\nname = "a"\ngpus = 8\nunits = {hb = "h"}\n' * 2)
    for arguments, code, message in (
        (("--dp", "64"), 3, "256 GPUs too few"),
        (("--inventory", str(twice)), 2, "a name of its own"),
        (("--emit", "yaml"), 2, "one of ray, slurm, ranks"),
    ):
        refused = sizing("place", "--cluster", "dgx-h100", "--tp", "8", *arguments)
        assert (refused.code, message in refused.err) == (code, True), refused.err
    job = ("place", "--cluster", "dgx-h100", "--tp", "8", "--pp", "2", "--dp", "2", "--emit")
    groups = json.loads(sizing(*job, "ray").out)["placement_groups"]
    assert [group["bundles"] for group in groups] == [[{"GPU": 8}] * 2] * 2


SITE = site([8] * 4)


@pytest.mark.parametrize("stages", [1, 2])
def test_ray_is_told_the_placement(stages: int) -> None:
    """
    Two prefill replicas of TP4 and one of decode of TP8, or one each of TP8 PP2.

    *stages* are the nodes of a replica.
    """
    counts, widths = ((2, 1), (4, 8)) if stages == 1 else ((1, 1), (8, 8))
    groups = pooled(SITE, counts, widths, stages=stages).groups

    ray = scheduler_manifests.ray(SITE, groups)
    replicas = ray["placement_groups"]
    assert sum(bundle["GPU"] for group in replicas for bundle in group["bundles"]) == 16 * stages
    strategy = "STRICT_PACK" if stages == 1 else "PACK"
    selectors = [group["bundle_label_selector"] for group in replicas]
    assert {(g["strategy"], len(g["bundles"])) for g in replicas} == {(strategy, stages)}
    assert {len(each) for each in selectors} == {stages}
    assert {s[NODE_LABEL] for each in selectors for s in each} == set(ray["node_labels"])


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
    job = place_ranks(Degrees(tp=2, cp=2, pp=3, dp=2), unit_tree(SITE), SITE.tiers)
    head, *lines = scheduler_manifests.rank_file(job).splitlines()
    assert head == "rank node gpu tp cp pp dp"
    assert [line.split()[0] for line in lines] == [str(rank) for rank in range(24)]
    assert lines[13].split()[3:] == ["1", "0", "0", "1"]
    assert lines[11].split()[3:] == ["1", "1", "2", "0"]


def test_tp_that_may_straddle_takes_equal_shares_of_domains() -> None:
    root = unit_tree(site([8, 8, 8]))
    for tp in (12, 16):
        wide = place_ranks(Degrees(tp=tp), root, TIERS, RankRules(straddle=True))
        assert f"TP{tp} straddles 2 units of hb" in wide.warnings[0]
        assert [node for node, _ in wide.ranks] == ["n0"] * (tp // 2) + ["n1"] * (tp // 2)
    found = pooled(site([8, 8, 8]), (1, 1), (16, 8))
    assert "prefill: TP16 straddles 2 units" in found.warnings[0]
    assert [len(group.gpus) for group in found.groups] == [16, 8]
