"""Where the replicas of a plan stand, before `sizing place` is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import NegativeAnswer
from minicluster.specs.topology import Node
from sizing import catalog
from sizing.network.gpu_groups import PoolRequest
from sizing.network.plan_nodes import place

H100 = catalog.clusters()["h100-8"]
POOLS = st.tuples(st.integers(1, 20), st.sampled_from((1, 2, 4, 8, 16)))


def both(prefill: tuple[int, int], decode: tuple[int, int]) -> list[tuple[str, PoolRequest]]:
    """Return replicas and TP of two pools on H100."""
    return [
        ("h100-sxm", PoolRequest(role=role, replicas=replicas, tp=tp))
        for role, (replicas, tp) in (("prefill", prefill), ("decode", decode))
    ]


@settings(max_examples=40)
@given(prefill=POOLS, decode=POOLS)
def test_placement(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """Every GPU once, replicas inside a domain where they fit one, powers of two without gaps."""
    placed = place(H100, both(prefill, decode))
    taken = [(p.node, gpu) for each in placed.values() for p in each for gpu in p.gpus]
    assert len(set(taken)) == len(taken) == prefill[0] * prefill[1] + decode[0] * decode[1]
    assert {gpu for _, gpu in taken} <= set(range(8))
    for role, (replicas, tp) in (("prefill", prefill), ("decode", decode)):
        assert len(placed[role]) == replicas * max(1, tp // 8)
    assert {node for node, _ in taken} == {f"node-{n}" for n in range(-(-len(taken) // 8))}


@pytest.mark.parametrize("tp", [3, 5, 12])
def test_widths_that_leave_gaps_take_more_nodes(tp: int) -> None:
    """Groups of TP stay inside a domain; wider ones take equal shares of several."""
    placed = place(H100, both((4, tp), (1, 8)))
    assert sum(len(p.gpus) for p in placed["prefill"]) == 4 * tp
    shares = {3: 3, 5: 5, 12: 6}
    assert {len(p.gpus) for p in placed["prefill"]} == {shares[tp]}


def test_listed_nodes_are_taken() -> None:
    """A cluster that lists its nodes has no others, and none that are down."""
    nodes = tuple(
        Node(name=name, gpus=8, units={"hb": name}, state=state)
        for name, state in (("a", "down"), ("b", "ok"), ("c", "ok"))
    )
    cluster = replace(H100, nodes=nodes)
    placed = place(cluster, both((2, 4), (1, 8)))
    assert {p.node for pool in placed.values() for p in pool} == {"b", "c"}
    with pytest.raises(NegativeAnswer, match="24 GPUs, 16 are free: 8 too few"):
        place(cluster, both((2, 4), (2, 8)))
