"""Collectives by tier and by library."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from minicluster.errors import InputError
from minicluster.specs.efficiency import CollectiveTable
from minicluster.specs.gpu import MeasuredCollective
from sizing import catalog
from sizing.cli.app import app
from sizing.latency.collectives import all_reduce_s
from sizing.latency.library import left_out, with_gpu_points
from sizing.latency.tiered import network, tiered_s
from sizing.network.collective import Question, answer

MOSTLY_LATENCY_BYTES = 2**20


def run(*arguments: str) -> tuple[int, str]:
    """Run `sizing fabric`; return exit code of refusals and what it printed."""
    result = CliRunner().invoke(app, ["fabric", *arguments])
    if isinstance(result.exception, InputError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.stdout


def nccl_on_two_nodes() -> MeasuredCollective:
    """Return what was measured of NCCL's all-reduce on two nodes of H100."""
    (table,) = (
        each
        for each in catalog.collectives()["h100-sxm"].measured
        if (each.library, each.domains) == ("nccl", 2)
    )
    return table


def test_library_points_follow_from_the_others() -> None:
    """Every point of every library on H100, 2 to 16 GPUs: small within 15 %, large within 12 %."""
    measured = with_gpu_points(
        catalog.collectives()["h100-sxm"].measured, catalog.find_gpu("h100-sxm")
    )
    rows = [row for table in measured for row in left_out(table)]
    assert {row.library for row in rows} == {"nccl", "mscclpp", "custom"}
    assert {row.gpus for row in rows} == {2, 4, 8, 16}
    outliers = [row for row in rows if row.outlier]
    assert [(row.library, row.gpus, row.size_bytes) for row in outliers] == [("nccl", 16, 262144)]
    for row in rows:
        limit = 0.15 if row.size_bytes <= MOSTLY_LATENCY_BYTES else 0.12
        assert row.outlier or abs(row.error_fraction) < limit, row


def test_a_group_wider_than_every_table_pays_more_hops_and_more_traffic() -> None:
    """Of 16 GPUs where 4 were measured: latency doubles with log2, bytes by 15/16 over 3/4 (N3)."""
    latency_s, large = 10e-6, 1e9
    table = CollectiveTable(size_bytes=(1e3, large), seconds=(latency_s, 5e-3))
    gpu = catalog.find_gpu("h100-sxm")
    assert gpu.efficiency is not None
    gpu = replace(gpu, efficiency=replace(gpu.efficiency, all_reduce={"4": table}))
    wide = replace(catalog.clusters()["h100-8"], gpus_per_hb_domain=16, max_gpus=16)
    assert float(all_reduce_s(1e3, 4, gpu, wide)) == pytest.approx(latency_s)
    assert float(all_reduce_s(1e3, 16, gpu, wide)) == pytest.approx(2 * latency_s)
    more = (2 * 15 / 16) / (2 * 3 / 4)
    expected = 2 * latency_s + more * (5e-3 - latency_s)
    assert float(all_reduce_s(large, 16, gpu, wide)) == pytest.approx(expected)


@pytest.mark.parametrize("size", [1024.0, 65_536.0, 524_288.0, 4 * 2.0**20, 48e6, 2.0**30])
def test_a_faster_network_than_the_measured_one_is_never_slower(size: float) -> None:
    cluster, _ = catalog.find_network("h100-8")
    gpu, table = catalog.find_gpu(cluster.gpu), nccl_on_two_nodes()
    assert table.between_bytes_per_s is not None

    def over(share: float) -> float:
        per_s = share * table.between_bytes_per_s
        return float(all_reduce_s(size, 16, gpu, replace(cluster, scale_out_bytes_per_s=per_s)))

    measured_s = over(1.0)
    for less, more in pairwise((0.25, 0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 2.0, 4.0)):
        assert over(more) <= over(less)
    assert over(0.99) >= measured_s >= over(1.01)


def test_measured_points_come_back() -> None:
    """Every point of NCCL on two nodes is what a step pays, outliers apart."""
    cluster, _ = catalog.find_network("dgx-h100")
    gpu = catalog.find_gpu(cluster.gpu)
    table = nccl_on_two_nodes()
    kept = [
        (size, seconds)
        for size, seconds in zip(table.size_bytes, table.seconds, strict=True)
        if size not in table.outlier_bytes
    ]
    assert len(kept) == 12
    sizes, seconds = zip(*kept, strict=True)
    assert all_reduce_s(sizes, 16, gpu, cluster) == pytest.approx(np.array(seconds))


@pytest.mark.parametrize(("nodes", "hops"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_a_tree_over_nodes_has_whole_levels(nodes: int, hops: int) -> None:
    """Small messages wait for log2 of the nodes, rounded up, up the tree and down it (eq. H2)."""
    _, found = catalog.find_network("dgx-superpod-h100")
    alone, together = (
        float(tiered_s(1e-6, "all-reduce", found, found.spans(8 * each))) for each in (1, nodes)
    )
    inside = found.tiers[0].latency_s * math.log2(8)
    assert alone == pytest.approx(inside, rel=1e-6)
    between = network(found, found.spans(8 * nodes)).hop_s
    assert together - alone == pytest.approx(2 * hops * between, rel=1e-6)


NODES = [("h200-8", 32, 2**32, 2**32 * 2 * 31 / 32 / 365e9), ("b200-8", 32, 2**32, 22.05e-3)]
"""Four nodes, public nccl-tests."""


def test_the_formula_sees_no_table() -> None:
    """Every point of NCCL on two and four nodes within 15 %, 1 KiB to 4 GiB, its outlier apart."""
    table = nccl_on_two_nodes()
    points = [
        ("h100-8", table.gpus, size, seconds)
        for size, seconds in zip(table.size_bytes, table.seconds, strict=True)
        if size not in table.outlier_bytes
    ]
    assert len(points) == 12
    for cluster, gpus, size, seconds in (*points, *NODES):
        _, found = catalog.find_network(cluster)
        protocols = catalog.collectives()["nccl"].protocols
        ours = float(tiered_s(size, "all-reduce", found, found.spans(gpus), protocols))
        assert ours == pytest.approx(seconds, rel=0.15), (cluster, size)


def test_libraries_say_nothing_of_sizes_far_beyond_their_points() -> None:
    """MSCCL++ was measured up to 1 MiB: 3.2 GB come from the formula, and say so."""
    code, out = run("collective", "--group", "16", "--bytes", "3.2e9", "--library", "mscclpp",
                    "--json")  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found["basis"] == "formula"
    assert set(found["libraries"]) == {"nccl"}


@pytest.mark.parametrize("size", [8192.0, 524_288.0, 48e6])
def test_steps_take_what_the_command_prints(size: float) -> None:
    """The step model and `fabric collective --library nccl` read one source across nodes."""
    cluster, network = catalog.find_network("dgx-h100")
    gpu = catalog.find_gpu(cluster.gpu)
    asked = Question(pattern="all-reduce", group=16, size_bytes=size)
    said = answer(asked, network, measured=with_gpu_points(gpu.collectives.measured, gpu),
                  protocols=gpu.collectives.protocols, library="nccl")  # fmt: skip
    assert float(all_reduce_s(size, 16, gpu, cluster)) == said.seconds
    wide = answer(replace(asked, group=32), network, protocols=gpu.collectives.protocols)
    assert float(all_reduce_s(size, 32, gpu, cluster)) == wide.formula_s


@given(
    st.sampled_from(("all-reduce", "all-gather", "reduce-scatter", "all-to-all")),
    st.integers(2, 24_576),
    st.floats(1.0, 1e10),
    st.floats(1.0, 4.0),
)
def test_more_bytes_and_fewer_uplinks_are_never_faster(
    pattern: str, group: int, size: float, factor: float
) -> None:
    _, narrow = catalog.find_network("roce-24k")
    spans = narrow.spans(group)
    less = float(tiered_s(size, pattern, narrow, spans))
    assert float(tiered_s(size * factor, pattern, narrow, spans)) >= less
    _, pod = catalog.find_network("dgx-superpod-h100")
    if group <= 16 and pod.spans(group)[0] == spans[0]:
        assert float(tiered_s(size, pattern, pod, pod.spans(group))) <= less * (1 + 1e-9)


def test_kv_across_zones() -> None:
    """10.74 GB over 8 NICs at 7:1 take 188 ms at full rate; our NICs reach 92 % of it."""
    _, found = catalog.find_network("roce-24k")
    asked = Question(pattern="point-to-point", group=2, stride=3072, size_bytes=327_680 * 4096.0)
    across = answer(asked, found).seconds
    assert across == pytest.approx(0.188 / 0.92, rel=0.01)
    near = answer(
        Question(pattern="point-to-point", group=2, stride=16, size_bytes=327_680 * 4096.0), found
    )
    assert near.meets_in == "pod"
    assert near.seconds == pytest.approx(across / 7, rel=0.01)


def test_rings_hardly_notice_oversubscription() -> None:
    """One ring a rail leaves a pod: 7:1 slows an all to all by 7, an all-reduce not at all."""
    _, found = catalog.find_network("roce-24k")
    slowed = {}
    for pattern in ("all-reduce", "all-to-all"):
        flat = found.spans(3072)
        wide = found.spans(6144)
        slowed[pattern] = float(tiered_s(1e9, pattern, found, wide)) / float(
            tiered_s(1e9, pattern, found, flat)
        )
    assert slowed["all-reduce"] < 1.1
    assert slowed["all-to-all"] == pytest.approx(7 / 2, rel=0.05)  # half of the bytes leave the pod


def test_cross_rail_traffic_is_forwarded() -> None:
    """Rail-only: a send to another rail adds one through the HB domain."""
    _, found = catalog.find_network("gh200-256")
    times = {
        (stride, rails): answer(
            Question(
                pattern="point-to-point", group=2, stride=stride, size_bytes=1e9, rail_only=rails
            ),
            found,
        ).seconds
        for stride in (256, 257)
        for rails in (False, True)
    }
    assert times[256, True] == times[256, False] == times[257, False]
    inside = found.tiers[0].latency_s + 1e9 / found.tiers[0].achieved_bytes_per_s()
    assert times[257, True] == pytest.approx(times[257, False] + inside)


def test_rings_of_the_talk() -> None:
    """1,024 rings' members, one a rack: messages shrink, and hops take 20 ms."""
    _, found = catalog.find_network("talk-32k")
    wide = [
        answer(Question(pattern="all-reduce", group=n, stride=16, size_bytes=1e6), found)
        for n in (64, 1024)
    ]
    assert [each.chunk_bytes for each in wide] == [1e6 / 64, 1e6 / 1024]
    assert all(each.ring_s is not None for each in wide)
    assert wide[1].ring_s == pytest.approx(2 * 1023 * 11e-6, rel=0.15)
    assert wide[1].formula_s < wide[1].ring_s
