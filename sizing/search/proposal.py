"""A configuration written out as a plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from sizing.plan import (
    SCHEMA_VERSION,
    CalibrationNote,
    Cost,
    Deployable,
    EngineSettings,
    Latency,
    Plan,
    PlanModel,
    Pool,
    Prediction,
    Provenance,
    Routing,
)
from sizing.search.bottleneck import bottlenecks
from sizing.search.evidence import interval_around, validation
from sizing.search.headroom import headroom
from sizing.search.layout import block_size, kv_pool_bytes, max_model_len
from sizing.search.placement import place
from sizing.traffic.forecast import capacity_requests_per_s, utilisations

if TYPE_CHECKING:
    from sizing.plan import Inputs
    from sizing.search.candidate import Candidate
    from sizing.traffic.forecast import Forecast
    from sizing.traffic.spread import Spread
    from sizing.validation.interval import Interval


def propose(inputs: Inputs, chosen: Candidate, found: Forecast) -> Plan:
    """Write *chosen* out as a plan; equal inputs give an equal plan."""
    model, engine = inputs.model, inputs.engine
    return Plan(
        schema_version=SCHEMA_VERSION,
        model=PlanModel(id=model.id, source=model.source, config_hash=model.config_hash),
        engine=EngineSettings(
            name=engine.name,
            version=engine.version,
            max_model_len=max_model_len(inputs),
            block_size=block_size(inputs),
            kv_dtype=model.kv_dtype,
            memory_fraction=engine.memory_fraction,
        ),
        step_model=chosen.tandem.step_model,
        inputs=inputs,
        slo=inputs.scenario.slo,
        workload=inputs.scenario.workload,
        pools=pools(inputs, chosen),
        routing=Routing(),
        prediction=prediction(inputs, chosen, found),
        cost=_cost(inputs, chosen),
        headroom=headroom(chosen, inputs.scenario.slo),
        calibration=_calibration(inputs),
        validated_on=validation(inputs),
        deployable=Deployable(
            profile=f"{engine.name}-{engine.version}-{engine.connector}", ok=True
        ),
        provenance=Provenance(version=version("minicluster"), inputs_hash=_hash(inputs)),
    )


def pools(inputs: Inputs, chosen: Candidate) -> tuple[Pool, ...]:
    """Return both pools, placed."""
    tandem, layout = chosen.tandem, chosen.layout
    sizes = [
        ("prefill", tandem.prefill.replicas, layout.prefill_tp),
        ("decode", tandem.decode.replicas, layout.decode_tp),
    ]
    placement = place(sizes, inputs.cluster)
    # A prompt's KV cache stays with prefill until decode has pulled it.
    held = tandem.prefill.max_batch_size + tandem.decode.max_batch_size
    return tuple(
        Pool(
            role=role,
            replicas=replicas,
            tp=tp,
            pp=1,
            ep=1,
            gpu=inputs.gpu.name,
            dtype=inputs.model.weight_dtype,
            max_batch_size=getattr(tandem, role).max_batch_size,
            max_batched_tokens=getattr(tandem, role).max_batched_tokens,
            kv_bytes=kv_pool_bytes(inputs, tp, sequences=held),
            placement=placement[role],
        )
        for role, replicas, tp in sizes
    )


def prediction(inputs: Inputs, chosen: Candidate, found: Forecast) -> Prediction:
    """Return what the plan promises."""
    coupling = found.coupling
    load = inputs.scenario.workload
    return Prediction(
        ttft=_latency(found.ttft, interval_around("ttft", inputs)),
        tpot=_latency(found.tpot, interval_around("tpot", inputs)),
        itl=_latency(found.itl),
        e2e=_latency(found.e2e),
        output_tokens_per_s=load.requests_per_s * float(chosen.tandem.output_tokens.mean()),
        capacity_requests_per_s=capacity_requests_per_s(chosen.tandem),
        utilisation_fraction=utilisations(
            chosen.tandem, coupling.prefill_slowdown, coupling.decode_slowdown
        ),
        bottleneck=bottlenecks(inputs, chosen, found),
        ttft_parts_s=found.parts_s,
    )


def _latency(spread: Spread, around: Interval | None = None) -> Latency:
    """Read the statistics off; *around* is the interval of a prediction of one second."""
    return Latency(
        mean_s=spread.mean,
        p50_s=spread.quantile(0.5),
        p90_s=spread.quantile(0.9),
        p95_s=spread.quantile(0.95),
        p99_s=spread.quantile(0.99),
        error_fraction=None if around is None else max(1 - around.low_s, around.high_s - 1),
        low_factor=None if around is None else around.low_s,
        high_factor=None if around is None else around.high_s,
    )


def _cost(inputs: Inputs, chosen: Candidate) -> Cost:
    """Count GPUs, whole nodes, power and dollars."""
    nodes = {p.node for pool in pools(inputs, chosen) for p in pool.placement}
    price, power = inputs.cluster.price_usd_per_gpu_hour, inputs.gpu.power_w
    return Cost(
        gpus=chosen.gpus,
        nodes=len(nodes),
        gpu_power_w=None if power is None else power * chosen.gpus,
        price_usd_per_hour=None if price is None else price * chosen.gpus,
    )


def _calibration(inputs: Inputs) -> CalibrationNote:
    """Say which fit the step times stand on."""
    found = inputs.calibration
    if found is not None:
        error = max(found.prefill.error_fraction, found.decode.error_fraction)
        return CalibrationNote(name=found.name, date=found.date, error_fraction=error)
    efficiency = inputs.gpu.efficiency
    fitted = efficiency is not None and efficiency.fitted
    dates = [source.date for source in inputs.gpu.sources if "efficiency" in source.covers]
    return CalibrationNote(
        name=f"{inputs.gpu.name} op tables" if fitted else f"{inputs.gpu.name} documented defaults",
        date=max(dates, default=""),
        error_fraction=None,
    )


def _hash(inputs: Inputs) -> str:
    """Fingerprint everything that the plan was computed from."""
    text = json.dumps(asdict(inputs), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
