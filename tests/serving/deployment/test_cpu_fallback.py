from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import NegativeAnswer
from minicluster.plan import Deployment
from serving.deployment.cpu_fallback import substituted
from serving.deployment.feasibility import findings
from serving.deployment.target import Target
from tests.serving.plans import make_pool, places


@pytest.fixture
def wide(deployment: Deployment) -> Deployment:
    """Return TP 8 pools for GPUs, in fp8, with more KV cache than any laptop has."""
    h100 = {"tp": 8, "gpu": "h100-sxm", "dtype": "fp8", "kv_bytes": 6e10}
    pools = tuple(
        make_pool(role, placement=places((node, tuple(range(8)))), **h100)
        for role, node in (("prefill", "node-0"), ("decode", "node-1"))
    )
    return replace(deployment, pools=pools, engine=replace(deployment.engine, block_size=16))


def test_tp_8_becomes_2_and_says_so(wide: Deployment, target: Target) -> None:
    """On four cores TP 8 becomes 2, every change is named, and the rest can be deployed."""
    four = replace(target, cores=frozenset({0, 1, 2, 3}), memory_bytes=64 << 30)
    small, changes = substituted(wide, four)
    assert [(pool.tp, pool.replicas, pool.gpu) for pool in small.pools] == [(2, 1, "cpu")] * 2
    for change in ("pools[prefill].tp: 2 instead of 8", "pools[decode].dtype: bf16 instead of fp8"):
        assert change in changes
    assert any("kv_bytes" in change for change in changes)
    assert "engine.block_size: 32 instead of 16" in changes
    assert not findings(small, four)


def test_what_fits_is_left_alone_and_what_cannot_is_refused(
    deployment: Deployment, wide: Deployment, target: Target
) -> None:
    assert substituted(deployment, target) == (deployment, ())
    with pytest.raises(NegativeAnswer, match="2 pools; this machine has 1"):
        substituted(wide, replace(target, cores=frozenset({0})))


@given(
    cores=st.integers(2, 16),
    widths=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2),
    counts=st.tuples(*[st.integers(1, 5)] * 2),
)
def test_every_worker_has_a_core_of_its_own(
    deployment: Deployment,
    target: Target,
    cores: int,
    widths: tuple[int, int],
    counts: tuple[int, int],
) -> None:
    """Whatever the plan: no core twice, none that is not there, TP divides the planned one."""
    pools = tuple(
        make_pool(
            role,
            tp=width,
            replicas=count,
            gpu="h100-sxm",
            placement=places(*((f"{role}-{n}", tuple(range(width))) for n in range(count))),
        )
        for role, width, count in zip(("prefill", "decode"), widths, counts, strict=True)
    )
    planned = replace(deployment, pools=pools)
    machine = replace(target, cores=frozenset(range(cores)))
    small, changes = substituted(planned, machine)
    taken = [gpu for pool in small.pools for place in pool.placement for gpu in place.gpus]
    assert len(taken) == len(set(taken)) <= cores
    assert set(taken) <= machine.cores
    for pool in small.pools:
        before = planned.pool(pool.role)
        assert before.tp % pool.tp == 0
        assert 1 <= pool.replicas <= before.replicas
        assert pool.kv_bytes <= before.kv_bytes
    assert changes
