"""Tiers that nest, units by name, groups over tiers, inventories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.specs.cluster import topology_of
from minicluster.specs.topology import Inventory, Node, TierSpec
from sizing import catalog

ROCE = catalog.files("clusters")["roce-24k"].read_text(encoding="utf-8")


UNITS = [("gbit_per_s", 400.0), ("gbyte_per_s", 50.0), ("bytes_per_s", 50e9)]


@pytest.mark.parametrize(("key", "number"), UNITS)
def test_bandwidths_are_converted_by_name(key: str, number: float) -> None:
    one_way, two_way = (
        TierSpec(name="rack", gpus=16, two_way=both, **{key: number}) for both in (False, True)
    )
    assert (one_way.one_way_bytes_per_s, two_way.one_way_bytes_per_s) == (50e9, 25e9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gbit_per_s = 400", "bandwidth = 400", "a key that says its unit"),
        ("gbit_per_s = 400", "bw_GBps = 50", "gbit_per_s"),
        ("gbit_per_s = 400", "bytes_per_s = 400", "a link of a GPU"),
        ("gbit_per_s = 400", "gbit_per_s = 400\ngbyte_per_s = 50", "exactly one bandwidth"),
        ("gbyte_per_s = 450", "gbyte_per_s = 900", "two_way = true"),
        ("gpus = 3072", "gpus = 3000", "sizes nest"),
        ("gpus = 16\n", "gpus = 8\n", "sizes nest"),
        ("gpus_per_hb_domain = 8", "gpus_per_hb_domain = 4", "the HB domain"),
        ("max_gpus = 24576", "max_gpus = 24577", "at most the 24576 GPUs"),
        ("oversubscription = 7", "oversubscription = 0.14", "1:7 is written 7"),
        ('name = "pod"', 'name = "rack"', "a name of its own"),
        ("gbyte_per_s = 450", "oversubscription = 2", "nothing is below the HB domain"),
        ('"node", "rack", "pod"', '"node", "row"', "one of"),
        ("latency_s = 10e-6", "", "latency_s is missing"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Wrong units, directions, sizes and names are named, none is guessed."""
    assert old in ROCE
    file = tmp_path / "cluster.toml"
    file.write_text(ROCE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        catalog.find_network(str(file))


def test_groups_spread_over_tiers() -> None:
    """Neighbours fill the inner tiers first; a stride skips them."""
    _, found = catalog.find_network("roce-24k")
    assert found.spans(8) == (8, 1, 1, 1)
    assert found.spans(16) == (8, 2, 1, 1)
    assert found.spans(16_384) == (8, 2, 192, 6)
    assert found.spans(128, stride=128) == (1, 1, 24, 6)
    with pytest.raises(InputError, match="24576 GPUs"):
        found.spans(24_577)


@given(st.integers(1, 24_576))
def test_neighbours_are_in_the_innermost_unit_that_holds_them(gpus: int) -> None:
    """Those further out have no more bandwidth and no less latency (eq. F3)."""
    _, found = catalog.find_network("roce-24k")
    index = found.holding(gpus)
    assert [tier.gpus >= gpus for tier in found.tiers] == [n >= index for n in range(4)]
    tier, inner = found.tiers[index], found.tiers[0]
    assert tier.latency_s >= inner.latency_s
    assert tier.achieved_bytes_per_s() <= inner.achieved_bytes_per_s()


def node(name: str, **units: str) -> Node:
    return Node(name=name, gpus=8, units=units)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((node("a"), node("a")), "a name of its own"),
        ((node("a", row="1"),), "row"),
        ((node("a", rack="r0", pod="p0"), node("b", rack="r0", pod="p1")), "has other nodes there"),
        ((), "at least one node"),
    ],
)
def test_inventories_are_checked(nodes: tuple[Node, ...], message: str) -> None:
    """Duplicate nodes, unknown tiers and units in two places are refused."""
    with pytest.raises(InputError, match=message):
        Inventory(nodes=nodes, tiers=("hb", "rack", "pod"))


def test_a_cluster_without_tiers_has_two() -> None:
    """An HB domain and one network, as long as there is more than the domain."""
    cluster = catalog.clusters()["h100-8"]
    gpu = catalog.find_gpu(cluster.gpu)
    found = topology_of(cluster, gpu)
    assert [(tier.name, tier.gpus) for tier in found.tiers] == [("hb", 8), ("network", 64)]
    assert len(topology_of(replace(cluster, max_gpus=8), gpu).tiers) == 1
    with pytest.raises(InputError, match=r"scale_out_latency_s is missing.*preset"):
        topology_of(replace(cluster, scale_out_latency_s=None), gpu)
