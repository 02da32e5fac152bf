"""Plans of any layout, for tests of exports."""

from __future__ import annotations

from dataclasses import replace

from minicluster.plan import Plan, Pool
from minicluster.plan.deployment import Placement
from minicluster.specs.slicing import Slicing
from sizing.catalog import find_model
from tests.sizing.scenarios import inputs, proposed

ON_NODE = 8
"""GPUs of a node of `SMALL`."""


def plan_with(**pools: tuple[int, Slicing]) -> Plan:
    """Return a plan with so many replicas of a slicing by role, on nodes of their own."""
    plan = proposed(inputs())
    return replace(plan, pools=tuple(_pool(plan, role, *size) for role, size in pools.items()))


def deepseek(**pools: tuple[int, Slicing]) -> Plan:
    """Return the same for DeepSeek-V3 in fp8, with two drafts and 32 copies of experts."""
    plan, model = plan_with(**pools), find_model("deepseek-v3", drafts=True)
    assert model.moe is not None
    model = replace(model, moe=replace(model.moe, redundant_experts=32), kv_dtype="bf16")
    engine = replace(plan.engine, speculative_tokens=2, kv_dtype="bf16")
    return replace(
        plan,
        inputs=replace(plan.inputs, model=model),
        engine=engine,
        pools=tuple(replace(pool, dtype=model.weight_dtype) for pool in plan.pools),
    )


def _pool(plan: Plan, role: str, replicas: int, slicing: Slicing) -> Pool:
    placement = []
    for replica in range(replicas):
        for first in range(0, slicing.gpus, ON_NODE):
            gpus = tuple(range(min(ON_NODE, slicing.gpus - first)))
            placement.append(Placement(node=f"{role}-{replica}-{first}", gpus=gpus))
    return replace(
        plan.pools[0], role=role, replicas=replicas, spare_replicas=0, placement=tuple(placement),
        tp=slicing.tp, pp=slicing.pp, dp=slicing.dp, ep=slicing.ep,
    )  # fmt: skip
