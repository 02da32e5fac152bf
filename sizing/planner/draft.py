"""The deployment on which `sizing calibrate --engine` measures, before there is a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.plan import Pool, Routing
from minicluster.specs.slicing import Slicing
from sizing.network.gpu_groups import PoolRequest
from sizing.planner.deployment import deployment_of
from sizing.planner.layout import LayoutShape, kv_pool_bytes
from sizing.planner.placement import place

if TYPE_CHECKING:
    from minicluster.plan import Deployment, Inputs

CONTEXT_TOKENS = 1024
"""Room for the longest prompt of the measurement, its answer included."""

MOST_SEQUENCES = 16
"""In a decode step: the largest batch that is measured, and so the largest that is planned."""


def draft_deployment(inputs: Inputs) -> Deployment:
    """
    Return one prefill and one decode replica at TP 1 of the scenario's model.

    They stand where a plan of one replica each would place them, so that a plan on the same
    cores finds the interference that was measured. A scenario with `model.max_context_tokens`
    gets the very engines of its plan of one replica each: `serving up` then keeps them.
    """
    model = inputs.model
    context = inputs.scenario.model.max_context_tokens or CONTEXT_TOKENS
    context = min(context, model.max_context_tokens)
    batches = {"prefill": 1, "decode": MOST_SEQUENCES}
    one_each = [(inputs.gpu.name, PoolRequest(role=role, replicas=1, tp=1)) for role in batches]
    placement = place(inputs.cluster, one_each)
    sequences = sum(batches.values())
    shape = LayoutShape(slicing=Slicing(), gpu=inputs.gpu.name)
    pools = tuple(
        Pool(
            role=role,
            replicas=1,
            tp=1,
            pp=1,
            ep=1,
            gpu=inputs.gpu.name,
            ray_accelerator=inputs.gpu.ray_accelerator,
            dtype=model.weight_dtype,
            max_batch_size=batch,
            max_batched_tokens=inputs.engine.max_batched_tokens,
            kv_bytes=kv_pool_bytes(inputs, shape, sequences=sequences, context_tokens=context),
            placement=placement[role],
        )
        for role, batch in batches.items()
    )
    routing = Routing(policy="least-tokens")
    return deployment_of(inputs, pools, routing=routing, context_tokens=context)
