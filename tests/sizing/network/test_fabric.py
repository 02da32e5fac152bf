"""
Bills of materials, clusters as built, hashed flows, the rail-only study, the commands.

The study's own numbers are claims of the seed documents: tests/sizing/cli/test_seeds.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minicluster.specs.fabric import KINDS
from sizing.network.bom import NetworkOrder, bill
from sizing.network.ecmp import Collisions, Hashing, collisions
from sizing.network.rail_only_study import find_study, study
from sizing.report.fabric import short, study_page
from tests.sizing.conftest import Sizing

PAPER = find_study("rail-only")
SUPERPOD = {
    256: (8, 4), 512: (16, 8), 1024: (32, 16), 2048: (64, 32), 4096: (128, 128, 64),
    8192: (256, 256, 128), 16384: (512, 512, 256),
}  # fmt: skip
"""Leaf, spine, core switches of NVIDIA's DGX SuperPOD reference architecture, by GPUs."""


def test_superpod_counts() -> None:
    for gpus, switches in SUPERPOD.items():
        found = bill(NetworkOrder(gpus=gpus, hb_size=8, radix=64, kind="clos"))
        assert found.switches_per_tier == switches
        assert found.tiers == len(switches)
        assert found.links == gpus * found.tiers
        assert found.endpoints_per_leaf == 32


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


def test_flows_even_out() -> None:
    """16 flows a pair collide less than one; drawn and exact shares of idle uplinks agree."""

    def collided(flows: int) -> Collisions:
        return collisions(Hashing(pairs=16, uplinks=16, flows=flows), trials=10_000, seed=1)

    one, many = collided(1), collided(16)
    assert many.imbalance_mean < one.imbalance_mean
    assert many.throughput_fraction > one.throughput_fraction
    assert many.slowest_fraction > one.slowest_fraction
    for found in (one, many):
        assert found.idle_fraction == pytest.approx(found.idle_exact_fraction, abs=0.005)
        assert found.imbalance_mean >= 1
    # With one flow a link carries its share of full-rate pairs: what is not idle is used.
    assert one.throughput_fraction == pytest.approx(1 - one.idle_fraction)
    assert collided(1) == one


@pytest.mark.parametrize(
    ("arguments", "basis", "known"),
    [
        (("--group", "8"), "measured: nccl", {"nccl", "mscclpp", "custom"}),
        (("--group", "7"), "formula", set()),
        (("--group", "4", "--stride", "2"), "formula", set()),
        (("--group", "8", "--pattern", "all-gather", "--bytes", "1e12"), "formula", set()),
        (("--group", "1"), "formula", set()),
        # MSCCL++ was measured up to 1 MiB, and a table says nothing far beyond its points.
        (("--group", "16", "--bytes", "3.2e9", "--library", "mscclpp"), "formula", {"nccl"}),
    ],
)
def test_a_table_is_read_for_such_groups_only(
    sizing: Sizing, arguments: tuple[str, ...], basis: str, known: set[str]
) -> None:
    done = sizing("fabric", "collective", "--library", "nccl", *arguments, "--json")
    found = json.loads(done.out)
    assert (found["basis"], set(found["libraries"])) == (basis, known)


def test_charts_draw_the_study(sizing: Sizing, tmp_path: Path) -> None:
    target = tmp_path / "study.html"
    done = sizing("fabric", "rail-only", "--html", str(target), "--json")
    html = unescape(target.read_text(encoding="utf-8"))
    assert all(warning in html for warning in json.loads(done.out)["warnings"])
    found = study(PAPER)
    page = study_page(found)
    assert html.count('class="chart"') == len(page.figures)
    for sweep in found.hb_sweeps:
        times = page.figure(f"Iteration time, {short(sweep.gpus)} GPUs").trace(sweep.model)
        assert times["x"] == [point.step.hb_size for point in sweep.points]
        assert times["y"] == pytest.approx([point.total_s for point in sweep.points], rel=1e-5)


def test_options_of_the_bill() -> None:
    order = NetworkOrder(gpus=1024, hb_size=8, radix=64, kind="clos")
    plain = bill(order)
    copper = bill(replace(order, dac_tiers=1))
    assert copper.transceivers == plain.transceivers - 2 * 1024
    assert copper.copper_links == 1024
    spare = bill(replace(order, kind="rail-only", spares=1))
    assert spare.spare_switches == spare.trees == 8
    noted = ["spare switches lie ready" in " ".join(found.notes) for found in (plain, spare)]
    assert noted == [False, True]
    power = bill(replace(order, switch_port_power_w=10.0, transceiver_power_w=9.0))
    assert power.power_w == 10 * power.ports + 9 * power.transceivers
