"""What a configuration runs: pools with limits and places, spare replicas, and the measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.plan import Deployment, EngineSettings, Pool, Routing
from minicluster.specs.slicing import Slicing
from sizing.network.gpu_groups import PoolRequest
from sizing.network.spares import replica_spares
from sizing.planner.layout import LayoutShape, block_size, kv_pool_bytes, max_model_len
from sizing.planner.placement import place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Inputs
    from sizing.planner.candidates import Candidate

MEASURED_CONTEXT_TOKENS = 1024
"""Context of the engines that are measured: room for the longest timed prompt and its answer."""

MEASURED_SEQUENCES = 16
"""Sequences of the largest decode batch that is measured, and so of the largest that is planned."""


def deployment(
    inputs: Inputs, chosen: Candidate, *, spares: Mapping[str, int] | None = None
) -> Deployment:
    """Return what *chosen* runs, with *spares* more replicas by role; none without them."""
    return _deployment(
        inputs,
        pools(inputs, chosen, spares=spares),
        max_model_len=max_model_len(inputs),
        routing=Routing(
            policy=chosen.tandem.prefill_policy,
            local_threshold_tokens=chosen.tandem.local_threshold_tokens,
        ),
    )


def measurement_deployment(inputs: Inputs) -> Deployment:
    """
    Return what `sizing calibrate --engine` measures: one prefill and one decode replica at TP 1.

    They stand where a plan of one replica each would place them, so that a plan on the same
    cores finds the interference that was measured. A scenario with `model.max_context_tokens`
    gets the very engines of its plan of one replica each: `serving up` then keeps them.
    """
    context = inputs.scenario.model.max_context_tokens or MEASURED_CONTEXT_TOKENS
    context = min(context, inputs.model.max_context_tokens)
    batches = {"prefill": 1, "decode": MEASURED_SEQUENCES}
    one_each = [(inputs.gpu.name, PoolRequest(role=role, replicas=1, tp=1)) for role in batches]
    placement = place(inputs.cluster, one_each)
    shape = LayoutShape(slicing=Slicing(), gpu=inputs.gpu.name)
    sequences = sum(batches.values())
    engine = inputs.engine_on(inputs.gpu.name)
    measured = tuple(
        Pool(
            role=role,
            replicas=1,
            tp=1,
            pp=1,
            ep=1,
            gpu=inputs.gpu.name,
            ray_accelerator=inputs.gpu.ray_accelerator,
            dtype=inputs.model.weight_dtype,
            max_num_seqs=batch,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            kv_bytes=kv_pool_bytes(
                inputs, shape, max_num_seqs=batch, held=sequences, context_tokens=context
            ),
            placement=placement[role],
        )
        for role, batch in batches.items()
    )
    routing = Routing(policy="least-tokens")
    return _deployment(inputs, measured, max_model_len=context, routing=routing)


def _deployment(
    inputs: Inputs, found: tuple[Pool, ...], *, max_model_len: int, routing: Routing
) -> Deployment:
    model, engine = inputs.model, inputs.engine
    return Deployment(
        model=model,
        engine=EngineSettings(
            name=engine.name,
            version=engine.version,
            max_model_len=max_model_len,
            block_size=block_size(inputs),
            kv_dtype=model.kv_dtype,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            # vLLM refuses a chunk beyond the context.
            chunked_prefill_tokens=min(engine.chunked_prefill_tokens, max_model_len),
        ),
        pools=found,
        routing=routing,
    )


def pools(
    inputs: Inputs, chosen: Candidate, *, spares: Mapping[str, int] | None = None
) -> tuple[Pool, ...]:
    """Return the pools with the GPUs that their replicas take."""
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
            max_num_seqs=stage.max_batch_size * shape.slicing.pp,
            max_num_batched_tokens=stage.max_batched_tokens,
            kv_bytes=kv_pool_bytes(
                inputs,
                shape,
                max_num_seqs=stage.max_batch_size * shape.slicing.pp,
                held=held,
                context_tokens=max_model_len(inputs),
            ),
            placement=placement[role],
            spare_replicas=counts[role],
        )
        for role, shape in shapes.items()
        for stage in (tandem.prefill if role == "prefill" else tandem.decode,)
    )


def spare_replicas(inputs: Inputs, chosen: Candidate) -> dict[str, int]:
    """
    Return the k of each pool's N + k replicas.

        A_pool = A^(1/pools): all pools together reach A      (docs/model.md, eq. U4)

    Args:
        inputs: `search.spare_replicas`, or `search.availability_fraction` and the cluster's
            failures.
        chosen: replicas that the SLO needs; any GPU of one takes it down.

    Raises:
        InputError: an availability is asked for, and the cluster's failures are unknown.

    Ignores:
        Requests that were on a failed replica, failures that take several replicas.

    """
    asked, shapes = inputs.scenario.search, chosen.layout.shapes
    target = asked.availability_fraction
    if target is None:
        return dict.fromkeys(shapes, asked.spare_replicas)
    failures = inputs.cluster.failures
    if failures is None:
        raise InputError(
            "search.availability_fraction",
            target,
            f"the failure rate of cluster {inputs.cluster.name}, which has none",
            "cluster.gpu_mtbf_s and cluster.repair_s, or a preset with [failures]",
        )
    return {
        role: replica_spares(
            chosen.replicas[role],
            shape.gpus,
            gpu_mtbf_s=failures.gpu_mtbf_s,
            repair_s=failures.node_repair_s,
            availability=target ** (1 / len(shapes)),
        ).spares
        for role, shape in shapes.items()
    }
