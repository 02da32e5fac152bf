"""Bills of materials, clusters as built, hashed flows, the commands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minicluster.specs.fabric import KINDS
from sizing import catalog
from sizing.network.bom import NetworkOrder, bill, tree
from sizing.network.bom_as_built import built_bill
from sizing.network.ecmp import Hashing, collisions

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sizing.conftest import Sizing

SUPERPOD = {
    256: [8, 4],
    512: [16, 8],
    1024: [32, 16],
    2048: [64, 32],
    4096: [128, 128, 64],
    8192: [256, 256, 128],
    16384: [512, 512, 256],
}
"""Leaf, spine, core switches of NVIDIA's DGX SuperPOD reference architecture, by GPUs."""


@pytest.mark.parametrize("gpus", SUPERPOD)
def test_superpod_counts(gpus: int) -> None:
    found = bill(NetworkOrder(gpus=gpus, hb_size=8, radix=64, kind="clos"))
    assert list(found.switches_per_tier) == SUPERPOD[gpus]
    assert found.tiers == len(SUPERPOD[gpus])
    assert found.links == gpus * found.tiers
    assert found.endpoints_per_leaf == 32


@pytest.mark.parametrize(
    ("gpus", "radix", "clos", "rails", "saving", "saving_4"),
    [
        (32768, 64, (3, 2560, 196608), (2, 1536, 131072), 0.375, 0.385),
        (32768, 128, (3, 1280, 196608), (1, 256, 65536), 0.75, 0.769),
        (32768, 256, (2, 384, 131072), (1, 128, 65536), 0.60, 0.625),
        (65536, 64, (3, 5120, 393216), (2, 3072, 262144), 0.375, 0.385),
        (65536, 128, (3, 2560, 393216), (2, 1536, 262144), 0.375, 0.385),
        (65536, 256, (3, 1280, 393216), (1, 256, 131072), 0.75, 0.769),
    ],
)
def test_rail_only_against_clos(
    gpus: int,
    radix: int,
    clos: tuple[int, int, int],
    rails: tuple[int, int, int],
    saving: float,
    saving_4: float,
) -> None:
    """Counts of the paper's sizes, and its savings at 2:1 and 4:1."""
    for kind, counts in (("clos", clos), ("rail-only", rails)):
        found = bill(NetworkOrder(gpus=gpus, hb_size=256, radix=radix, kind=kind))
        assert (found.tiers, found.switches, found.transceivers) == counts
    for ratio, expected in ((2.0, saving), (4.0, saving_4)):
        order = NetworkOrder(
            gpus=gpus, hb_size=256, radix=radix, kind="rail-only", price_ratio=ratio
        )
        assert bill(order).saving_fraction == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("gpus", [16, 32, 64])
def test_mini_clusters_save_nothing(gpus: int) -> None:
    orders = [NetworkOrder(gpus=gpus, hb_size=8, radix=64, kind=kind) for kind in KINDS]
    assert {bill(order).switches for order in orders} == {1}
    rails = bill(orders[KINDS.index("rail-only")])
    assert rails.saving_fraction == 0
    assert any("saves nothing" in note for note in rails.notes)
    assert "two switches" in {other.name for other in rails.alternatives}


def test_deep_rails_save_nothing() -> None:
    """With 8 rails on 24K GPUs each rail is itself a tree of three tiers."""
    rails = bill(NetworkOrder(gpus=24_576, hb_size=8, radix=64, kind="rail-only"))
    assert (rails.tiers, rails.saving_fraction) == (3, 0)


@given(
    st.sampled_from(KINDS), st.integers(1, 2000), st.integers(1, 64), st.sampled_from((16, 40, 64))
)
def test_bills_conserve_ports(kind: str, domains: int, hb_size: int, radix: int) -> None:
    """No more ports are used than there are; each link has two ends; bisection is full."""
    gpus = domains * hb_size
    assume(gpus <= 2 * (radix // 2) ** 3)
    found = bill(NetworkOrder(gpus=gpus, hb_size=hb_size, radix=radix, kind=kind))
    assert found.ports_used == 2 * found.links - gpus
    assert found.ports_used <= found.ports
    assert found.transceivers == 2 * found.links
    assert set(found.links_per_tier) == {gpus}
    assert sum(found.switches_per_tier) == found.switches


@given(st.integers(1, 60_000), st.sampled_from((8, 32, 64, 128)))
def test_trees_fit_their_switches(endpoints: int, radix: int) -> None:
    assume(endpoints <= 2 * (radix // 2) ** 3)
    found = tree(endpoints, radix)
    up = [endpoints] * (len(found.switches) - 1) + [0]
    for above, count in zip(up, found.switches, strict=True):
        assert endpoints + above <= count * radix


def test_options_of_the_bill() -> None:
    plain = bill(NetworkOrder(gpus=1024, hb_size=8, radix=64, kind="clos"))
    copper = bill(NetworkOrder(gpus=1024, hb_size=8, radix=64, kind="clos", dac_tiers=1))
    assert copper.transceivers == plain.transceivers - 2 * 1024
    assert copper.copper_links == 1024
    spare = bill(NetworkOrder(gpus=1024, hb_size=8, radix=64, kind="rail-only", spares=1))
    assert spare.spare_switches == spare.trees == 8
    noted = ["spare switches lie ready" in " ".join(found.notes) for found in (plain, spare)]
    assert noted == [False, True]
    power = bill(
        NetworkOrder(
            gpus=1024, hb_size=8, radix=64, kind="clos", switch_port_power_w=10.0,
            transceiver_power_w=9.0,
        )
    )  # fmt: skip
    assert power.power_w == 10 * power.ports + 9 * power.transceivers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "16384", "--radix", "8"), "8 ports reach 128 (42 ports would do)"),
        (("--gpus", "64", "--radix", "1"), "2 ports or more"),
        (("--gpus", "100"), "whole HB domains"),
        (("--gpus", "0"), "positive"),
        (("--gpus", "64", "--kind", "ring"), "one of clos"),
        (("--gpus", "64", "--price-ratio", "0"), "positive"),
        ((), "how many endpoints"),
        (("--preset", "h100-8"), "switches tier by tier"),
        (("--preset", "nosuch"), "a cluster preset"),
    ],
)
def test_orders_that_cannot_be(sizing: Sizing, arguments: tuple[str, ...], message: str) -> None:
    done = sizing("fabric", "bom", *arguments)
    assert done.code == 2
    assert message in done.err


def test_the_24k_cluster_as_built() -> None:
    """Switches, optics and ports of the RoCE cluster; its ToR with spares has 34 ports."""
    found = built_bill(catalog.clusters()["roce-24k"], catalog.switches())
    assert found.switches_per_tier == (1536, 128, 16)
    assert found.spares_per_tier == (0, 16, 2)
    assert (found.copper_links, found.transceivers) == (24_576, 57_344)
    assert found.links_per_tier[2] == 4096
    rack, pod, _ = found.details
    assert (rack.ports_used, rack.ports_with_spares, pod.ports_used) == (32, 34, 224)
    assert pod.oversubscription == 6


def test_a_chassis_too_small(sizing: Sizing, tmp_path: Path) -> None:
    """A 7804R3 has 144 ports: too few for a cluster switch."""
    text = catalog.files("clusters")["roce-24k"].read_text(encoding="utf-8")
    file = tmp_path / "small.toml"
    file.write_text(text.replace("arista-7808r3", "arista-7804r3"), encoding="utf-8")
    done = sizing("fabric", "bom", "--preset", str(file))
    assert done.code == 2
    assert "144" in done.err


def test_flows_even_out() -> None:
    """16 flows a pair collide less than one; drawn and exact shares of idle uplinks agree."""
    one, many = (collisions(Hashing(pairs=16, uplinks=16, flows=n), seed=1) for n in (1, 16))
    assert many.imbalance_mean < one.imbalance_mean
    assert many.throughput_fraction > one.throughput_fraction
    assert many.slowest_fraction > one.slowest_fraction
    for found in (one, many):
        assert found.idle_fraction == pytest.approx(found.idle_exact_fraction, abs=0.005)
        assert found.imbalance_mean >= 1
    # With one flow a link carries its share of full-rate pairs: what is not idle is used.
    assert one.throughput_fraction == pytest.approx(1 - one.idle_fraction)
    again = collisions(Hashing(pairs=16, uplinks=16, flows=1), seed=1)
    assert again == one


@pytest.mark.parametrize(
    "arguments",
    [
        ("collective", "--group", "16", "--library", "nccl"),
        ("collective", "--check"),
        ("bom", "--gpus", "64", "--kind", "rail-only"),
        ("ecmp", "--trials", "100"),
    ],
    ids=" ".join,
)
def test_commands_print_tables(sizing: Sizing, arguments: tuple[str, ...]) -> None:
    assert sizing("fabric", *arguments).code == 0
    done = sizing("fabric", *arguments, "--json")
    assert done.code == 0
    assert json.loads(done.out)


@pytest.mark.parametrize(
    ("arguments", "basis"),
    [
        (("--group", "8"), "measured: nccl"),
        (("--group", "7"), "formula"),
        (("--group", "4", "--stride", "2"), "formula"),
        (("--group", "8", "--pattern", "all-gather", "--bytes", "1e12"), "formula"),
        (("--group", "1"), "formula"),
    ],
)
def test_a_table_is_read_for_such_groups_only(
    sizing: Sizing, arguments: tuple[str, ...], basis: str
) -> None:
    found = json.loads(
        sizing("fabric", "collective", "--library", "nccl", *arguments, "--json").out
    )
    assert found["basis"] == basis
    assert ("nccl" in found["libraries"]) == (basis != "formula")
