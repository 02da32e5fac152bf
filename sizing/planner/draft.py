"""The deployment on which `sizing calibrate --engine` measures, before there is a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.plan import Deployment, EngineSettings, PlanModel, Pool, Routing
from minicluster.specs.slicing import Slicing
from sizing.planner.layout import LayoutShape, block_size, kv_pool_bytes
from sizing.planner.placement import place

if TYPE_CHECKING:
    from minicluster.plan import Inputs

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
    model, engine = inputs.model, inputs.engine
    context = inputs.scenario.model.max_context_tokens or CONTEXT_TOKENS
    context = min(context, model.max_context_tokens)
    placement = place([("prefill", 1, 1), ("decode", 1, 1)], inputs.cluster)
    batches = {"prefill": 1, "decode": MOST_SEQUENCES}
    sequences = sum(batches.values())
    return Deployment(
        model=PlanModel(id=model.id, source=model.source, config_hash=model.config_hash),
        architecture=model,
        engine=EngineSettings(
            name=engine.name,
            version=engine.version,
            max_model_len=context,
            block_size=block_size(inputs),
            kv_dtype=model.kv_dtype,
            memory_fraction=engine.memory_fraction,
        ),
        pools=tuple(
            Pool(
                role=role,
                replicas=1,
                tp=1,
                pp=1,
                ep=1,
                gpu=inputs.gpu.name,
                dtype=model.weight_dtype,
                max_batch_size=batch,
                max_batched_tokens=engine.max_batched_tokens,
                kv_bytes=_kv_bytes(inputs, context, sequences),
                placement=placement[role],
            )
            for role, batch in batches.items()
        ),
        routing=Routing(policy="least-tokens"),
    )


def _kv_bytes(inputs: Inputs, context: int, sequences: int) -> float:
    """KV cache per pool: what memory leaves, on a CPU what *sequences* of *context* need."""
    if inputs.gpu.kind != "cpu":
        shape = LayoutShape(slicing=Slicing(), gpu=inputs.gpu.name)
        return kv_pool_bytes(inputs, shape, sequences=sequences)
    each = kv_bytes_per_sequence(inputs.model, context, tp=1, block_size=block_size(inputs))
    return float(sequences * each)
