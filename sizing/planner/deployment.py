"""What a configuration runs: pools with limits and places, spare replicas, and the measurement."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.plan import Deployment, EngineSettings, Pool, Routing
from sizing.catalog.engine import schedules_ahead
from sizing.catalog.host_link import kv_offload
from sizing.network.gpu_groups import PoolRequest
from sizing.network.plan_nodes import place
from sizing.planner.configuration import Configuration
from sizing.planner.layout import (
    Layout,
    LayoutShape,
    block_size,
    kv_pool_bytes,
    max_model_len,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import Inputs
    from minicluster.specs.engine import EngineProfile, EngineRules

MEASURED_CONTEXT_TOKENS = 1024
"""Context of the engines that are measured: room for the longest timed prompt and its answer."""

MEASURED_SEQUENCES = {"cpu": 16, "gpu": 64}
"""Sequences of the largest decode batch that is measured, and so of the largest that is planned."""


def deployment(
    inputs: Inputs,
    chosen: Configuration,
    *,
    spares: Mapping[str, int] | None = None,
    kv_bytes: Mapping[str, float] | None = None,
) -> Deployment:
    """
    Return what *chosen* runs.

    Args:
        spares: more replicas by role; `None`: none.
        kv_bytes: KV cache per GPU by role; `None`: all that memory leaves.
    """
    routing = Routing(
        policy=inputs.scenario.search.routing,
        local_threshold_tokens=chosen.local_threshold_tokens,
    )
    return _deployment(
        inputs,
        chosen,
        max_model_len=max_model_len(inputs),
        routing=routing,
        spares=spares or {},
        kv_bytes=kv_bytes or {},
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
    most = inputs.engine_on(inputs.gpu.name).max_num_seqs
    measured = Configuration(
        layout=Layout.split(1, 1, inputs.gpu.name),
        replicas={"prefill": 1, "decode": 1},
        max_batch={"prefill": 1, "decode": min(most, MEASURED_SEQUENCES[inputs.gpu.kind])},
    )
    routing = Routing(policy="least-tokens")
    return _deployment(
        inputs, measured, max_model_len=context, routing=routing, spares={}, kv_bytes={}
    )


def _deployment(
    inputs: Inputs,
    chosen: Configuration,
    *,
    max_model_len: int,
    routing: Routing,
    spares: Mapping[str, int],
    kv_bytes: Mapping[str, float],
) -> Deployment:
    model, engine = inputs.model, inputs.engine
    # vLLM refuses a chunk beyond the context.
    chunk = min(engine.chunked_prefill_tokens, max_model_len)
    options = replace(engine.options, chunked_prefill_tokens=chunk)
    return Deployment(
        model=model,
        engine=EngineSettings(
            name=engine.name,
            version=engine.version,
            max_model_len=max_model_len,
            block_size=block_size(inputs),
            kv_dtype=model.kv_dtype,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            all_to_all=None if engine.all_to_all is None else engine.all_to_all.name,
            kv_offload=kv_offload(
                inputs.scenario.engine, inputs.kinds.values(), engine=engine.name
            ),
            lora=engine.lora,
            rules=_rules(engine),
            **asdict(options),
        ),
        pools=_pools(inputs, chosen, spares, kv_bytes, context=max_model_len),
        routing=routing,
    )


def _rules(engine: EngineProfile) -> EngineRules | None:
    """Return the rules of engines that are planned as their rows ran; `None`: ADR 0021's."""
    if engine.deployable:
        return None
    return engine.rules(ahead=schedules_ahead(engine, engine.version))


def _pools(
    inputs: Inputs,
    chosen: Configuration,
    spares: Mapping[str, int],
    kv_bytes: Mapping[str, float],
    *,
    context: int,
) -> tuple[Pool, ...]:
    shapes = chosen.layout.shapes
    counts = {role: count + spares.get(role, 0) for role, count in chosen.replicas.items()}
    requests = [
        (shape.gpu, PoolRequest.of(role, counts[role], shape.slicing))
        for role, shape in shapes.items()
    ]
    placement = place(inputs.cluster, requests)
    # A prompt's KV cache stays with prefill until decode has pulled it.
    held = sum(chosen.max_batch.values())
    return tuple(
        Pool(
            role=role,
            replicas=counts[role],
            **asdict(shape.slicing),
            gpu=shape.gpu,
            ray_accelerator=inputs.kinds[shape.gpu].ray_accelerator,
            dtype=inputs.model.weight_dtype,
            max_num_seqs=(sequences := chosen.max_batch[role] * shape.slicing.pp),
            max_num_batched_tokens=_token_budget(inputs, role, shape, sequences),
            kv_bytes=kv_bytes.get(role)
            or kv_pool_bytes(
                inputs, shape, max_num_seqs=sequences, held=held, context_tokens=context
            ),
            placement=placement[role],
            spare_replicas=spares.get(role, 0),
        )
        for role, shape in shapes.items()
    )


def _token_budget(inputs: Inputs, role: str, shape: LayoutShape, sequences: int) -> int:
    """Return the tokens of a step: of decode with a library for experts those of its sequences."""
    if role == "decode" and inputs.engine.all_to_all and shape.slicing.routes_tokens:
        return sequences * (1 + inputs.engine.speculative_tokens)
    return inputs.engine_on(shape.gpu).max_num_batched_tokens


def spare_replicas(inputs: Inputs, chosen: Configuration) -> dict[str, int]:
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
    from sizing.network.spares import spares as fewest_spares  # noqa: PLC0415  (rarely asked)

    return {
        role: fewest_spares(
            chosen.replicas[role],
            mtbf_s=failures.gpu_mtbf_s / shape.gpus,  # of a replica (eq. U1)
            repair_s=failures.node_repair_s,
            availability=target ** (1 / len(shapes)),
        ).spares
        for role, shape in shapes.items()
    }


def gpus_with_spares(inputs: Inputs, chosen: Configuration) -> dict[str, int]:
    """Return the GPUs of each kind that a plan of *chosen* has, its spare replicas included."""
    found = dict(chosen.gpus_by_kind)
    for role, count in spare_replicas(inputs, chosen).items():
        shape = chosen.layout.shapes[role]
        found[shape.gpu] += count * shape.gpus
    return found
