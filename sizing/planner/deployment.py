"""What a configuration runs: pools, placed, with their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.plan import Deployment, EngineSettings, Pool, Routing
from sizing.network.gpu_groups import PoolRequest
from sizing.planner.layout import block_size, kv_pool_bytes, max_model_len
from sizing.planner.placement import place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Inputs
    from sizing.planner.candidate import Candidate


def deployment(
    inputs: Inputs, chosen: Candidate, *, spares: Mapping[str, int] | None = None
) -> Deployment:
    """Return what *chosen* runs, each pool with its *spares* more; none without them."""
    routing = Routing(
        policy=chosen.tandem.prefill_policy,
        local_threshold_tokens=chosen.tandem.local_threshold_tokens,
    )
    return deployment_of(
        inputs,
        pools(inputs, chosen, spares=spares),
        routing=routing,
        context_tokens=max_model_len(inputs),
    )


def deployment_of(
    inputs: Inputs, placed: tuple[Pool, ...], *, routing: Routing, context_tokens: int
) -> Deployment:
    """Return *placed* with model and engine of the inputs, for sequences of *context_tokens*."""
    model, engine = inputs.model, inputs.engine
    return Deployment(
        model=model,
        engine=EngineSettings(
            name=engine.name,
            version=engine.version,
            max_model_len=context_tokens,
            block_size=block_size(inputs),
            kv_dtype=model.kv_dtype,
            memory_fraction=engine.memory_fraction,
        ),
        pools=placed,
        routing=routing,
    )


def pools(
    inputs: Inputs, chosen: Candidate, *, spares: Mapping[str, int] | None = None
) -> tuple[Pool, ...]:
    """Return all pools, placed."""
    tandem, shapes = chosen.tandem, chosen.layout.shapes
    counts = {role: (spares or {}).get(role, 0) for role in shapes}
    placement = place(
        inputs.cluster,
        [
            (
                shape.gpu,
                PoolRequest(
                    role=role,
                    replicas=chosen.replicas[role] + counts[role],
                    tp=shape.slicing.tp,
                    pp=shape.lanes,
                ),
            )
            for role, shape in shapes.items()
        ],
    )
    # A prompt's KV cache stays with prefill until decode has pulled it.
    held = tandem.prefill.max_batch_size + tandem.decode.max_batch_size
    return tuple(
        Pool(
            role=role,
            replicas=chosen.replicas[role] + counts[role],
            tp=shape.slicing.tp,
            pp=shape.slicing.pp,
            ep=shape.slicing.ep,
            dp=shape.slicing.dp,
            gpu=shape.gpu,
            ray_accelerator=inputs.kinds[shape.gpu].ray_accelerator,
            dtype=inputs.model.weight_dtype,
            max_batch_size=stage.max_batch_size * shape.slicing.pp,
            max_batched_tokens=stage.max_batched_tokens,
            kv_bytes=kv_pool_bytes(
                inputs, shape, sequences=held, context_tokens=max_model_len(inputs)
            ),
            placement=placement[role],
            spare_replicas=counts[role],
        )
        for role, shape in shapes.items()
        for stage in (tandem.prefill if role == "prefill" else tandem.decode,)
    )
