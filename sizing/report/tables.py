"""A plan on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from minicluster.specs.slo import PERCENTILES
from minicluster.units import seconds
from sizing.planner.studies.cost import running
from sizing.queueing.prefill import CLOSED_FORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Latency, Plan, Pool, Prediction
    from minicluster.plan.prediction import Confidence
    from minicluster.specs.slo import SloSpec
    from sizing.planner.studies.cost import Running

GB = 1e9
MB = 1e6
SHOWN = tuple(each for each in PERCENTILES if each != "p90")


def size(value: float) -> str:
    """Write bytes as people read them."""
    return f"{value / GB:.1f} GB" if value >= GB / 10 else f"{value / MB:.0f} MB"


def layout_table(pools: tuple[Pool, ...], prediction: Prediction) -> Table:
    """One row a pool: size, limits, utilisation, what binds."""
    table = Table(title="Layout", title_justify="left")
    for heading, justify in (
        ("pool", "left"), ("replicas", "right"), ("TP", "right"), ("GPUs", "right"),
        ("batch", "right"), ("KV/GPU", "right"), ("used", "right"), ("bound by", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    kinds = {pool.gpu for pool in pools}
    for pool in pools:
        table.add_row(
            f"{pool.role} on {pool.gpu}" if len(kinds) > 1 else pool.role,
            str(pool.replicas),
            sliced(pool),
            str(pool.gpus),
            f"≤ {pool.max_batch_size}",
            size(pool.kv_bytes),
            f"{prediction.utilisation_fraction[pool.role]:.0%}",
            prediction.bottleneck[pool.role],
        )
    return table


def sliced(pool: Pool) -> str:
    """Write how a replica's GPUs share the model: the TP, and what else there is."""
    rest = (("PP", pool.pp), ("EP", pool.ep), ("DP", pool.dp))
    return f"{pool.tp}" + "".join(f" {name}{degree}" for name, degree in rest if degree > 1)


def kinds_of(plan: Plan) -> dict[str, int]:
    """Count the plan's GPUs by kind."""
    kinds: dict[str, int] = {}
    for pool in plan.pools:
        kinds[pool.gpu] = kinds.get(pool.gpu, 0) + pool.gpus
    return kinds


def free_gpus(plan: Plan) -> str:
    """Say which GPUs of the plan's nodes it leaves free; empty if none."""
    unit = "cores" if plan.inputs.gpu.kind == "cpu" else "GPUs"
    stranded = plan.cost.nodes * plan.inputs.cluster.gpus_per_node - plan.cost.gpus
    return f", {stranded} {unit} of which stay free" if stranded else ""


def latency_table(prediction: Prediction, slo: SloSpec) -> Table:
    """One row a latency: statistics, limit, verdict."""
    table = Table(title="Predicted latency", title_justify="left")
    table.add_column("")
    for statistic in SHOWN:
        table.add_column(statistic, justify="right")
    table.add_column(f"80 % interval at {slo.percentile}", justify="right")
    table.add_column(f"SLO at {slo.percentile}", justify="right")
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "ITL": slo.itl_s, "E2E": None}
    for name, limit in limits.items():
        latency: Latency = getattr(prediction, name.lower())
        verdict = Text()
        if limit is not None:
            holds = latency.at(slo.percentile) <= limit
            word, style = ("holds", "green") if holds else ("missed", "red")
            verdict = Text(f"< {seconds(limit)} {word}", style=style)
        table.add_row(
            name,
            *(seconds(latency.at(each)) for each in SHOWN),
            _interval(latency, slo.percentile),
            verdict,
        )
    return table


def _interval(latency: Latency, statistic: str) -> str:
    """Write the interval around one statistic; a hyphen where no measurement gives one."""
    if latency.low_factor is None or latency.high_factor is None:
        return "-"
    value = latency.at(statistic)
    return f"{seconds(value * latency.low_factor)} to {seconds(value * latency.high_factor)}"


def parts_table(prediction: Prediction) -> Table:
    """Mean TTFT by phase, with shares."""
    table = Table(title="Mean TTFT, in the order of the deployed system", title_justify="left")
    for heading in ("phase", "seconds", "share"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    total = prediction.ttft.mean_s
    for name, value in prediction.ttft_parts_s.items():
        table.add_row(name, seconds(value), f"{value / total:.1%}")
    table.add_row("TTFT", seconds(total), "100.0%", style="bold")
    return table


def summary(plan: Plan) -> Text:
    """Say in a few lines what was asked, what it takes, and what stands behind it."""
    cost, load = plan.cost, plan.workload
    unit = "cores" if plan.inputs.gpu.kind == "cpu" else "GPUs"
    lines = [
        f"{plan.model.id} on {' and '.join(kinds_of(plan))}, {load.requests_per_s:g} requests/s:"
        f" {cost.gpus} {unit} on {cost.nodes} node{'s' if cost.nodes > 1 else ''}"
        + free_gpus(plan),
        (
            f"Headroom at the predicted step times: {plan.headroom.load_factor:.2f} times the load,"
            f" then {plan.headroom.binds}; saturates at"
            f" {plan.prediction.capacity_requests_per_s:.3g} requests/s"
        ),
        (
            f"Step times: {plan.calibration.name}, {plan.calibration.date}, {_error(plan)};"
            f" {plan.validated_on.num_rows} measured rows behind it: {plan.validated_on.note}"
        ),
    ]
    lines[1:1] = _cost_lines(running(plan))
    if plan.confidence is not None:
        lines.append(_confidence(plan.confidence))
    local = plan.routing.local_threshold_tokens
    if local:
        lines.append(f"Prompts up to {local:,} tokens are computed by their decode replica")
    if plan.routing.policy not in CLOSED_FORMS:
        lines.append(f"Closed forms take {plan.routing.policy} routing as random, an upper bound")
    assumed = plan.inputs.scenario.model.assumed_context_tokens
    if assumed is not None:
        lines.append(f"Assumption of the scenario: {plan.model.id} serves {assumed:,} tokens")
    return Text("\n".join(lines))


def _cost_lines(cost: Running) -> Iterator[str]:
    """Say what the plan costs while it runs, and whose numbers these are."""
    parts = []
    if cost.usd_per_million_output_tokens is not None:
        parts.append(
            f"{cost.usd_per_hour:,.2f} US dollars an hour,"
            f" {cost.usd_per_million_output_tokens:,.2f} a million output tokens (your price)"
        )
    if cost.power_w is not None:
        parts.append(
            f"{cost.power_w / 1e3:,.1f} kW, {cost.joules_per_output_token:.2f} J an output token"
            f" (power: {cost.power_source})"
        )
    if parts:
        yield f"Cost: {'; '.join(parts)}"


def _confidence(found: Confidence) -> str:
    """Say how sure the promise is, and what other confidences take."""
    if not found.requests:
        return (
            "Not simulated: the search was interrupted, closed forms alone say that the SLO holds"
        )
    at = ", ".join(f"{gpus} GPUs at {float(name):.0%}" for name, gpus in found.gpus_at.items())
    return (
        f"Holds with {found.fraction:.0%} confidence: simulated with {found.requests:,} requests,"
        f" {found.seeds} seeds" + (f"; this layout takes {at}" if at else "")
    )


def _error(plan: Plan) -> str:
    """Say how far the fitted steps are from what they were fitted to."""
    measured = plan.calibration.error_fraction
    if measured is not None:
        return f"{measured:.1%} from the steps measured"
    fitted = max(plan.step_model.prefill.error_fraction, plan.step_model.decode.error_fraction)
    return f"{fitted:.1%} from the term-by-term model"
