"""Collectives by tier and by library."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from minicluster.specs.efficiency import CollectiveTable
from minicluster.specs.gpu import (
    AllToAllLibrary,
    CollectiveProtocol,
    GpuSpec,
    MeasuredCollective,
)
from minicluster.specs.topology import Tier, Topology
from sizing import catalog
from sizing.latency.collectives import (
    exchange_s,
    left_out,
    looked_up_s,
    point_to_point_s,
    with_gpu_points,
)
from sizing.latency.communication import Exchange
from sizing.latency.tiered import library_s, protocol_s, ring_s, tiered_s

MOSTLY_LATENCY_BYTES = 2**20
H100 = catalog.find_gpu("h100-sxm")
NODE = catalog.clusters()["h100-8"]
DGX = catalog.find_network("dgx-h100")[0]
MEASURED = with_gpu_points(H100.collectives.measured, H100)


def all_reduce_s(size: object, group: int, gpu: GpuSpec = H100, cluster: Any = DGX) -> Any:  # noqa: ANN401
    sizes = np.asarray(size, dtype=np.float64)
    return exchange_s(Exchange("", "N1", "all-reduce", group, 1, sizes), gpu, cluster)


def reduced_by(table: dict[str, CollectiveTable], latency_s: float = 0.0) -> GpuSpec:
    """Return an H100 with these all-reduce tables only."""
    efficiency = replace(H100.efficiency, all_reduce=table, collective_latency_s=latency_s)
    return replace(H100, efficiency=efficiency)


def nccl_on_two_nodes() -> tuple[MeasuredCollective, list[tuple[float, float]]]:
    """Return what was measured of NCCL's all-reduce on two nodes of H100, and its 12 points."""
    (table,) = (each for each in MEASURED if (each.library, each.domains) == ("nccl", 2))
    points = zip(table.size_bytes, table.seconds, strict=True)
    kept = [(size, seconds) for size, seconds in points if size not in table.outlier_bytes]
    assert len(kept) == 12
    return table, kept


def test_library_points_follow_from_the_others() -> None:
    """Every point of every library on H100, 2 to 16 GPUs: small within 15 %, large within 12 %."""
    rows = [row for table in MEASURED for row in left_out(table)]
    assert {row.library for row in rows} == {"nccl", "mscclpp", "custom"}
    assert {row.gpus for row in rows} == {2, 4, 8, 16}
    outliers = [row for row in rows if row.outlier]
    assert [(row.library, row.gpus, row.size_bytes) for row in outliers] == [("nccl", 16, 262144)]
    for row in rows:
        limit = 0.15 if row.size_bytes <= MOSTLY_LATENCY_BYTES else 0.12
        assert row.outlier or abs(row.error_fraction) < limit, row


def test_all_reduce_with_and_without_a_table() -> None:
    """
    A table is read log-log, beyond it at the last bandwidth (N1); 16 GPUs of 4 pay more (N3).

    Latency doubles with log2, bytes grow by 15/16 over 3/4. Without a table latency goes by
    log2 g, and 2 (g - 1) / g of the bytes over the link.
    """
    table = CollectiveTable(size_bytes=(1e3, 1e5), seconds=(1e-6, 1e-4))
    sizes = np.array([1.0, 1e3, 1e4, 1e5, 1e6])
    assert looked_up_s(sizes, table) == pytest.approx([1e-6, 1e-6, 1e-5, 1e-4, 1e-3])

    wide = replace(NODE, gpus_per_hb_domain=16, max_gpus=16)
    known = reduced_by({"4": CollectiveTable(size_bytes=(1e3, 1e9), seconds=(1e-5, 5e-3))})
    assert all_reduce_s(1e3, 4, known, wide) == pytest.approx(1e-5)
    assert all_reduce_s(1e3, 16, known, wide) == pytest.approx(2e-5)
    more = (2 * 15 / 16) / (2 * 3 / 4)
    assert all_reduce_s(1e9, 16, known, wide) == pytest.approx(2e-5 + more * (5e-3 - 1e-5))

    plain = reduced_by({}, latency_s=5e-6)
    expected = 5e-6 * 3 + 2 * 7 / 8 * 1e9 / (450e9 * plain.efficiency.scale_up_fraction)
    assert all_reduce_s(1e9, 8, plain, NODE) == pytest.approx(expected)
    assert all_reduce_s(1e9, 1, plain, NODE) == all_reduce_s(0.0, 8, plain, NODE) == 0


@pytest.mark.parametrize("size", [1024.0, 65_536.0, 524_288.0, 4 * 2.0**20, 48e6, 2.0**30])
def test_a_faster_network_than_the_measured_one_is_never_slower(size: float) -> None:
    per_s = nccl_on_two_nodes()[0].between_bytes_per_s

    def over(share: float) -> float:
        return float(
            all_reduce_s(size, 16, H100, replace(NODE, scale_out_bytes_per_s=share * per_s))
        )

    for less, more in pairwise((0.25, 0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 2.0, 4.0)):
        assert over(more) <= over(less)


@pytest.mark.parametrize(
    ("spread", "bus_bytes_per_s", "expected"),
    [
        ((8, 1), 1e12, 1e-6 + 2 * 7 * 2e-6 + 0.3),  # one hop an edge, nothing is posted
        ((8, 4), 1e12, 1e-6 + 2 * (7 * 4e-6 + 2 * 3e-6) + 0.3),  # two levels over the nodes
        ((4, 1), 1e9, 1e-6 + 2 * 3 * 2e-6 + 2 * 3 / 4 * 1e9 / 1e9),  # the bus is slower
    ],
)
def test_a_tree_of_a_library_by_hand(
    spread: tuple[int, int], bus_bytes_per_s: float, expected: float
) -> None:
    """Hops in a domain, crossings by levels, and the links' time or the bus (eq. H3)."""
    tree = CollectiveProtocol(
        name="x",
        algorithm="tree",
        base_s=1e-6,
        inside_s=2e-6,
        post_s=4e-6,
        between_s=3e-6,
        overhead=3.0,
        bus_bytes_per_s=(bus_bytes_per_s, 1e12, 1e12),
    )
    found = protocol_s(tree, "all-reduce", spread, np.array(1e9), np.array(0.1))
    assert float(found) == pytest.approx(expected)


TIERS = Topology(
    name="three tiers",
    gpus_per_node=8,
    tiers=tuple(
        Tier(
            name=f"of {gpus}", gpus=gpus, bytes_per_s=2 * bytes_per_s, efficiency_fraction=0.5,
            latency_s=latency_s, oversubscription=shared,
        )
        for gpus, bytes_per_s, latency_s, shared in ((8, 50, 1, 1), (32, 16, 3, 1), (128, 16, 5, 8))
    ),
)  # fmt: skip
"""64 GPUs are 2 leaves of 4 domains; two of eight GPUs' rings share an uplink of the spine."""

HOP_S = 11 / 3
"""Of four domains at 3 s and two at 5 s, by the doublings of each."""


@pytest.mark.parametrize(
    ("pattern", "gpus", "expected"),
    [
        ("all-reduce", 4, 2 + 1.5 * 800 / 50),
        ("all-reduce", 64, 3 + 2 * 3 * HOP_S + 1.75 * 800 / 50 + 0.2 * 1.75 * 800 / 8 / 8),
        ("all-gather", 64, 3 + 3 * HOP_S + 7 / 8 * 800 / 50 + 0.2 * 7 / 8 * 800 / 8 / 8),
        # A leaf is left by half of the bytes, at an eighth of a link.
        ("all-to-all", 64, 3 + 3 * HOP_S + 800 / 2 / 2 + 0.2 * 800 / 8 / 50),
    ],
)
def test_tiers_by_hand(pattern: str, gpus: int, expected: float) -> None:
    """Hops, and the longer of both parts with a fifth of the shorter (eq. H1 and H2)."""
    found = tiered_s([0.0, 800.0], pattern, TIERS, TIERS.spans(gpus))
    assert found == pytest.approx([0, expected])


@pytest.mark.parametrize(("pattern", "rounds"), [("all-reduce", 2), ("all-gather", 1)])
@pytest.mark.parametrize(("gpus", "hop_s", "per_s"), [(2, 1, 50), (8, 1, 50), (64, HOP_S, 8)])
def test_a_ring_hands_a_share_from_gpu_to_gpu(
    pattern: str, rounds: int, gpus: int, hop_s: float, per_s: float
) -> None:
    """N - 1 hops of S / n bytes; the slowest hop and link on its way count (eq. H6)."""
    found = ring_s([0.0, 800.0], pattern, TIERS, TIERS.spans(gpus))
    assert found == pytest.approx([0, rounds * (gpus - 1) * (hop_s + 800 / gpus / per_s)])


@pytest.mark.parametrize(
    ("distance", "sending", "expected"),
    [
        (7, {}, 1 + 800 / 50),
        (8, {}, 3 + 800 / 16),
        (32, {}, 5 + 800 * 8 / 16),
        (32, {"sending_fraction": 0.25}, 5 + 800 * 2 / 16),
        (32, {"sending_fraction": 0.01}, 5 + 800 / 16),
    ],
)
def test_a_stage_sends_to_the_next_one(
    distance: int, sending: dict[str, float], expected: float
) -> None:
    """A hop and a link of the tier that holds both; all send, unless it is said (eq. N5)."""
    found = point_to_point_s([0.0, 800.0], TIERS, distance, **sending)
    assert found == pytest.approx([0, expected])


REACHED = 8 * (1 - (1 - 1 / 8) ** 4)
"""Of eight GPUs or domains, those that four copies of a token reach on average."""


@pytest.mark.parametrize(
    ("gpus", "once", "expected"),
    [
        (8, True, 7 + 800 * REACHED * 7 / 8 / 20),
        (8, False, 2 + 800 * 4 / 8 * 7 / 50),
        (64, True, 7 + 800 * REACHED / 4),
        (64, False, 2 + 800 * 4 / 4),
    ],
)
def test_a_library_for_experts_by_hand(gpus: int, once: bool, expected: float) -> None:  # noqa: FBT001
    """A copy for each GPU that has experts, or for each expert (eq. H7)."""
    library = AllToAllLibrary(
        name="x", gpus=("any",), latency_s=2, prompt_latency_s=7, inside_fraction=0.5,
        inside_bytes_per_s=20, prompt_sms=0,
    )  # fmt: skip
    sent = Exchange("", "H7", "all-to-all", gpus, 1, 800.0, copies=4, once=once)
    found = library_s([0.0, 800.0], sent, library, TIERS, TIERS.spans(gpus))
    assert found == pytest.approx([0, expected])


NODES = [("h200-8", 32, 2**32, 2**32 * 2 * 31 / 32 / 365e9), ("b200-8", 32, 2**32, 22.05e-3)]
"""Four nodes, public nccl-tests."""


def test_the_formula_sees_no_table() -> None:
    """Every point of NCCL on two and four nodes within 15 %, 1 KiB to 4 GiB, its outlier apart."""
    points = [("h100-8", 16, *point) for point in nccl_on_two_nodes()[1]]
    for cluster, gpus, size, seconds in (*points, *NODES):
        _, found = catalog.find_network(cluster)
        protocols = catalog.collectives()["nccl"].protocols
        ours = float(tiered_s(size, "all-reduce", found, found.spans(gpus), protocols))
        assert ours == pytest.approx(seconds, rel=0.15), (cluster, size)
