"""Latencies, pools and TTFT phases as tables of the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from minicluster.specs.slo import PERCENTILES
from minicluster.units import seconds

if TYPE_CHECKING:
    from minicluster.plan import Latency, Plan, Pool, Prediction
    from minicluster.specs.slo import SloSpec

GB = 1e9
MB = 1e6
SHOWN = tuple(each for each in PERCENTILES if each != "p90")


def size(value: float) -> str:
    """Write bytes in GB, or in MB below a tenth of one."""
    return f"{value / GB:.1f} GB" if value >= GB / 10 else f"{value / MB:.0f} MB"


def layout_table(pools: tuple[Pool, ...], prediction: Prediction) -> Table:
    """Return one row per pool: size, limits, utilisation, bottleneck."""
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
            f"≤ {pool.max_num_seqs}",
            size(pool.kv_bytes),
            f"{prediction.utilisation_fraction[pool.role]:.0%}",
            prediction.bottleneck[pool.role],
        )
    return table


def sliced(pool: Pool) -> str:
    """Write the TP of a replica, and the other degrees above 1: `4 PP2`."""
    rest = (("PP", pool.pp), ("EP", pool.ep), ("DP", pool.dp))
    return f"{pool.tp}" + "".join(f" {name}{degree}" for name, degree in rest if degree > 1)


def kinds_of(plan: Plan) -> dict[str, int]:
    """Count the plan's GPUs by kind."""
    kinds: dict[str, int] = {}
    for pool in plan.pools:
        kinds[pool.gpu] = kinds.get(pool.gpu, 0) + pool.gpus
    return kinds


def free_gpus(plan: Plan) -> str:
    """Return how many GPUs of its nodes the plan leaves free; empty if none."""
    unit = "cores" if plan.inputs.gpu.kind == "cpu" else "GPUs"
    stranded = plan.cost.nodes * plan.inputs.cluster.gpus_per_node - plan.cost.gpus
    return f", {stranded} {unit} of which stay free" if stranded else ""


def latency_table(prediction: Prediction, slo: SloSpec) -> Table:
    """Return one row per latency: statistics, interval, limit, verdict."""
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
            interval(latency, slo.percentile) or "-",
            verdict,
        )
    return table


def interval(latency: Latency, statistic: str) -> str:
    """Write the 80 % interval around a statistic; empty where no measurement gives one."""
    if latency.low_factor is None or latency.high_factor is None:
        return ""
    value = latency.at(statistic)
    return f"{seconds(value * latency.low_factor)} to {seconds(value * latency.high_factor)}"


def parts_table(prediction: Prediction) -> Table:
    """Return the mean TTFT by phase, with shares."""
    table = Table(title="Mean TTFT, in the order of the deployed system", title_justify="left")
    for heading in ("phase", "seconds", "share"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    total = prediction.ttft.mean_s
    for name, value in prediction.ttft_parts_s.items():
        table.add_row(name, seconds(value), f"{value / total:.1%}")
    table.add_row("TTFT", seconds(total), "100.0%", style="bold")
    return table
