"""The words and figures of a plan's page: latencies, pools, assumptions, sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.units import seconds
from sizing.planner.studies.cost import DATASHEET, running
from sizing.report.tables import kinds_of, size, sliced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Plan
    from minicluster.stats.batch_means import BatchMeansInterval
    from sizing.simulation.outcome import Outcome

UNPROVEN = "the search was interrupted before it simulated; sizes by closed forms"
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def latency_rows(plan: Plan, outcome: Outcome) -> Iterator[list[str]]:
    """Yield two rows a latency: forecast and simulated."""
    simulated = outcome.latencies()
    for name in ("ttft", "tpot", "itl", "e2e"):
        predicted = getattr(plan.prediction, name)
        limit = plan.slo.limits_s.get(name)
        yield [
            f"{name.upper()} forecast",
            *(seconds(predicted.at(each)) for each in STATISTICS),
            "",
            "" if limit is None else f"{seconds(limit)} at {plan.slo.percentile}",
        ]
        if name in simulated:
            found = simulated[name]
            cells = [seconds(found[each].value_s) if each in found else "" for each in STATISTICS]
            yield [f"{name.upper()} simulated", *cells, _interval(found[plan.slo.percentile]), ""]


def pool_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield one row a pool."""
    for pool in plan.pools:
        used = plan.prediction.utilisation_fraction.get(pool.role)
        yield [
            f"{pool.role} on {pool.gpu}",
            str(pool.replicas),
            f"TP{sliced(pool)}",
            str(pool.gpus),
            f"up to {pool.max_batch_size}",
            size(pool.kv_bytes),
            "" if used is None else f"{used:.0%}",
            plan.prediction.bottleneck.get(pool.role, ""),
        ]  # fmt: skip


def assumption_rows(plan: Plan, outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield what the answer stands on, and how far off it may be."""
    scenario, cost = plan.inputs.scenario, running(plan)
    yield "arrivals", "Poisson, independent of one another"
    local = plan.routing.local_threshold_tokens
    kept = f"; prompts up to {local:,} tokens stay with their decode replica" if local else ""
    yield "routing", f"{plan.routing.policy} among prefill replicas{kept}"
    yield "step times", f"{plan.calibration.name}, {plan.calibration.date}"
    yield "error of the fitted steps", _fit_error(plan)
    behind = plan.validated_on
    yield "validation", f"{behind.num_rows} measured rows behind it: {behind.note}"
    for name in ("ttft", "tpot"):
        found = getattr(plan.prediction, name)
        if found.low_factor is not None and found.high_factor is not None:
            between = (
                f"between {found.low_factor:.2f} and {found.high_factor:.2f} times the prediction"
            )
            yield f"error of {name.upper()}", f"80 % of measurements like this lay {between}"
    sure = plan.confidence
    if sure is not None:
        slow = f"prefill steps {sure.prefill_factor:.2f} and decode steps {sure.decode_factor:.2f}"
        what = f"holds with {slow} times as long as predicted (slowed in the charts)"
        yield "confidence", f"{sure.fraction:.0%}: {what if sure.requests else UNPROVEN}"
    assumed = scenario.model.assumed_context_tokens
    if assumed is not None:
        yield "context", f"assumed: the model serves {assumed:,} tokens"
    if cost.power_source is not None:
        full = "at full power all the time"
        own = cost.power_source != DATASHEET
        yield "power", f"{full}, {'your number' if own else cost.power_source}"
    priced = cost.price_source is not None
    yield "price", "your number" if priced else "none given: no default is taken"
    counted = int(outcome.counts.sum())
    yield (
        "simulation",
        f"{len(outcome.due_s):,} requests, {counted:,} counted after the warm-up"
        + ("" if outcome.settled else "; no steady state was reached"),
    )
    if not plan.deployable.ok:
        yield "deployment", f"`serving up` refuses it: {plan.deployable.rule_broken}"


def source_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield where the numbers of GPU, cluster and engine come from."""
    inputs = plan.inputs
    engine = f"engine {inputs.engine.name} {inputs.engine.version}"
    kinds = {gpu.name: gpu for gpu in (inputs.gpu, *inputs.other_gpus)}
    for name, sources in (
        *((f"GPU {name}", kinds[name].sources) for name in kinds_of(plan)),
        (f"cluster {inputs.cluster.name}", inputs.cluster.sources),
        (engine, inputs.engine.sources),
    ):
        for source in sources:
            yield f"{name}: {source.covers}", f"{source.document} ({source.date})"


def _fit_error(plan: Plan) -> str:
    """Say how far the fitted steps are from what they were fitted to."""
    measured = plan.calibration.error_fraction
    if measured is not None:
        return f"{measured:.1%} from the steps measured"
    fitted = max(plan.step_model.prefill.error_fraction, plan.step_model.decode.error_fraction)
    return f"{fitted:.1%} from the term-by-term model"


def _interval(found: BatchMeansInterval) -> str:
    """Write the interval of a simulated value."""
    if found.low_s is None:
        return ""
    return f"{seconds(found.low_s)} - {'more' if found.high_s is None else seconds(found.high_s)}"
