"""Where the replicas of a plan stand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sizing import catalog
from sizing.planner.placement import place


@given(
    prefill=st.tuples(st.integers(1, 20), st.sampled_from((1, 2, 4, 8, 16))),
    decode=st.tuples(st.integers(1, 20), st.sampled_from((1, 2, 4, 8, 16))),
)
def test_placement(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """Every GPU once, replicas inside a domain where they fit one, powers of two without gaps."""
    cluster = catalog.clusters()["h100-8"]
    placed = place([("prefill", *prefill), ("decode", *decode)], cluster)
    taken = [(p.node, gpu) for each in placed.values() for p in each for gpu in p.gpus]
    assert len(set(taken)) == len(taken) == prefill[0] * prefill[1] + decode[0] * decode[1]
    assert {gpu for _, gpu in taken} <= set(range(8))
    for role, (replicas, tp) in (("prefill", prefill), ("decode", decode)):
        assert len(placed[role]) == replicas * max(1, tp // 8)
    assert len({node for node, _ in taken}) == -(-len(taken) // 8)


def test_the_demo_machine_is_placed_in_order() -> None:
    """On two cores prefill takes core 0 and decode core 1 of the only node."""
    placed = place([("prefill", 1, 1), ("decode", 1, 1)], catalog.clusters()["laptop"])
    assert [(p.node, p.gpus) for p in placed["prefill"]] == [("node-0", (0,))]
    assert [(p.node, p.gpus) for p in placed["decode"]] == [("node-0", (1,))]
