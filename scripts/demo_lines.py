"""What `make demo` prints of a plan, a load test and the pace of the engines, in lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def plan_lines(path: Path) -> list[str]:
    """Return a line about the plan."""
    plan = json.loads(path.read_text(encoding="utf-8"))
    pools = ", ".join(f"{p['replicas']} {p['role']} replica on 1 core" for p in plan["pools"])
    dtype, rate = plan["pools"][0]["dtype"], plan["workload"]["requests_per_s"]
    return [f"plan: {pools}, {dtype}, for {rate:g} requests/s", ""]


def load_lines(name: str, verdict: dict[str, Any]) -> list[str]:
    """Return predicted beside measured latencies of a load, and how fast the engines were."""
    judged = sum(verdict["outcomes"].values())
    compared = verdict["comparison"]
    if compared is None:
        return [f"{name}: {judged} requests judged, nothing to compare"]
    heads = f"{'predicted':>12}{'measured':>12}{'error':>8}"
    paced = bool(compared["pace"])
    lines = [f"{name + f', {judged} requests':36}{heads}{'at pace':>9}" if paced else
             f"{name + f', {judged} requests':36}{heads}"]  # fmt: skip
    rows = {(row["metric"], row["statistic"]): row for row in compared["rows"]}
    for metric, statistic in (("ttft", "mean"), ("ttft", "p90"), ("tpot", "mean"), ("tpot", "p90")):
        row = rows.get((metric, statistic))
        if row is not None:
            predicted, measured = 1e3 * row["predicted_s"], 1e3 * row["measured_s"]
            line = f"  {metric.upper() + ' ' + statistic:34}{predicted:9.1f} ms{measured:9.1f} ms"
            line += f"{row['error_fraction']:+8.0%}"
            lines.append(line + (f"{row['error_at_pace_fraction']:+9.0%}" if paced else ""))
    return [*lines, *pace_lines(compared)]


def pace_lines(compared: dict[str, Any]) -> list[str]:
    """Return how fast the engines were, and whether the prediction held."""
    means = {row["metric"]: row for row in compared["rows"] if row["statistic"] == "mean"}
    held = "held" if compared["held"] else "did not hold"
    error = "error_at_pace_fraction" if compared["pace"] else "error_fraction"
    errors = ", ".join(
        f"{metric.upper()} {means[metric][error]:+.0%} (of ±{most:.0%})"
        for metric, most in compared["tolerance"].items()
        if metric in means
    )
    lines = [
        f"  prediction of the means{' at that pace' if compared['pace'] else ''} {held}: {errors}"
    ]
    if compared["pace"]:
        paces = ", ".join(
            f"{role} {abs(pace - 1):.0%} {'slower' if pace >= 1 else 'faster'}"
            for role, pace in compared["pace"].items()
        )
        lines.insert(0, f"  engine steps against the plan's: {paces}")
    return lines


def slo_lines(verdict: dict[str, Any]) -> list[str]:
    """Return a line for each limit of the SLO."""
    return [
        f"{each['metric'].upper()} {each['percentile']} < {1e3 * each['limit_s']:g} ms: met by "
        f"{each['attained_fraction']:.1%} of {each['num_requests']} requests"
        f" (95 % sure: {each['attained_low']:.0%} or more)"
        for each in verdict["slo"]
    ]
