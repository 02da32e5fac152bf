"""A configuration written out as a plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from minicluster.plan import (
    Confidence,
    Deployable,
    Headroom,
    Latency,
    Plan,
    Prediction,
    Provenance,
)
from sizing.planner.aggregated import simulated_headroom, simulated_prediction
from sizing.planner.bottleneck import bottlenecks
from sizing.planner.deployment import deployment
from sizing.planner.evidence import interval_around, validation
from sizing.planner.layout import profile_rule
from sizing.planner.slo import headroom
from sizing.planner.spares import spare_replicas
from sizing.queueing.forecast import capacity_requests_per_s, utilisations

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.evidence.interval import PredictionInterval
    from sizing.planner.answer import Found
    from sizing.planner.candidate import Candidate
    from sizing.queueing.forecast import TandemForecast
    from sizing.queueing.spread import LatencyQuantiles


def propose(inputs: Inputs, found: Found) -> Plan:
    """Write what was found out as a plan; equal inputs give an equal plan."""
    engine, chosen = inputs.engine, found.candidate
    runs = deployment(inputs, chosen, spares=spare_replicas(inputs, chosen))
    rule = profile_rule(inputs, chosen.layout)
    return Plan(
        inputs=inputs,
        engine=runs.engine,
        step_model=chosen.tandem.step_model,
        pools=runs.pools,
        routing=runs.routing,
        prediction=promise(inputs, found),
        headroom=_headroom(inputs, found),
        validated_on=validation(inputs, split=chosen.layout.prefill is not None),
        deployable=Deployable(
            profile=f"{engine.name}-{engine.version}-{engine.connector}",
            rule_broken=rule,
        ),
        provenance=Provenance(version=version("minicluster"), inputs_hash=_hash(inputs)),
        confidence=_confidence(inputs, found),
    )


def promise(inputs: Inputs, found: Found) -> Prediction:
    """Return what the plan promises: of split pools by closed forms, of mixed ones simulated."""
    if found.forecast is not None:
        return prediction(inputs, found.candidate, found.forecast)
    return simulated_prediction(inputs, found.candidate)


def prediction(inputs: Inputs, chosen: Candidate, found: TandemForecast) -> Prediction:
    """Return the closed forms' prediction of split pools."""
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


def _latency(spread: LatencyQuantiles, around: PredictionInterval | None = None) -> Latency:
    """Read the statistics off; *around* is the interval of a prediction of one second."""
    return Latency(
        mean_s=spread.mean,
        p50_s=spread.quantile(0.5),
        p90_s=spread.quantile(0.9),
        p95_s=spread.quantile(0.95),
        p99_s=spread.quantile(0.99),
        low_factor=None if around is None else around.low_s,
        high_factor=None if around is None else around.high_s,
    )


def _headroom(inputs: Inputs, found: Found) -> Headroom:
    """Bisect it, by closed forms where there are any."""
    if found.forecast is None:
        return simulated_headroom(inputs, found.candidate)
    return headroom(found.candidate, inputs.scenario.slo)


def _confidence(inputs: Inputs, found: Found) -> Confidence | None:
    """Write down what was simulated; `None` of a measured machine, where nothing is."""
    if not found.verdicts and not found.interrupted:
        return None
    return Confidence(
        fraction=inputs.scenario.search.confidence_fraction if found.verdicts else 0.0,
        prefill_factor=found.errors.prefill,
        decode_factor=found.errors.decode,
        ttft_factor=found.errors.ttft,
        tpot_factor=found.errors.tpot,
        requests=sum(each.requests for each in found.verdicts),
        seeds=len(found.verdicts),
        tightest={
            each.check.name: max(
                one.check.seconds
                for one in found.verdicts
                if one.check is not None and one.check.name == each.check.name
            )
            for each in found.verdicts
            if each.check is not None
        },
        gpus_at={f"{share:g}": gpus for share, gpus in found.gpus_at.items()},
        other_pools=found.other,
        interrupted=found.interrupted,
    )


def _hash(inputs: Inputs) -> str:
    """Fingerprint everything that the plan was computed from."""
    text = json.dumps(asdict(inputs), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
