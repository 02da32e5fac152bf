"""A simulated run as tables, JSON, and a CSV of its requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from minicluster.files import write_table
from minicluster.pages.page import Cell, ChartRow, Section
from minicluster.pages.shown import sections_of
from minicluster.units import seconds
from sizing.report.tables import SHOWN, judged_at, size, table, verdict
from sizing.simulation.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from minicluster.specs.slo import SloSpec
    from minicluster.stats.batch_means import BatchMeansInterval
    from sizing.simulation.hit_rate import HitRate

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "stall": "longest stall"}


def simulation_json(outcome: Outcome, classes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the statistics of a run, also by the class of requests: all but single requests."""
    occupancy = outcome.occupancy
    by_class = {of: _latencies(outcome, at) for at, of in enumerate(classes)}
    return {
        **({"latencies_by_class": by_class} if by_class else {}),
        "requests": len(outcome.due_s),
        "counted_requests": int(outcome.counts.sum()),
        "settled": outcome.settled,
        "requests_per_s": _rate(outcome),
        "latencies": _latencies(outcome),
        "ttft_parts_s": {
            name: float(part[outcome.counts].mean()) for name, part in outcome.parts_s.items()
        },
        "busy_fraction": outcome.busy_fraction,
        "preemptions": int(outcome.preemptions.sum()),
        "cached_fraction": _cached_fraction(outcome),
        **({"cached_fraction_by_tier": _by_tier(outcome)} if _offloaded(outcome) else {}),
        **(
            {"adapter_loads_per_request": _loads_per_request(outcome)}
            if outcome.adapter_loads.any()
            else {}
        ),
        "kv_capacity_blocks": outcome.kv_capacity_blocks,
        "over_time": {
            "time_s": occupancy.time_s.tolist(),
            **{
                name: {role: each.tolist() for role, each in getattr(occupancy, name).items()}
                for name in ("waiting", "running", "kv_blocks")
            },
        },
    }


def _latencies(outcome: Outcome, of: int | None = None) -> dict[str, Any]:
    return {
        name: {statistic: asdict(value) for statistic, value in each.items()}
        for name, each in outcome.latencies(of).items()
    }


def request_columns(outcome: Outcome) -> dict[str, NDArray[Any]]:
    """Return what is known of every request, by name: seconds, tokens, replicas."""
    return {
        "due_s": outcome.due_s,
        "input_tokens": outcome.input_tokens,
        "output_tokens": outcome.output_tokens,
        "cached_tokens": outcome.cached_tokens,
        "prefill_replica": outcome.prefill_of,
        "decode_replica": outcome.decode_of,
        "ttft_s": outcome.ttft_s,
        "tpot_s": outcome.tpot_s,
        "e2e_s": outcome.e2e_s,
        "longest_stall_s": outcome.stall_s,
        "preemptions": outcome.preemptions,
        **{f"{name}_s": part for name, part in outcome.parts_s.items()},
        "counted": outcome.counts.astype(np.int64),
        **({"class": outcome.class_of} if outcome.class_of.any() else {}),
    }


def write_requests(outcome: Outcome, path: Path) -> None:
    """Write one line per request; values that a request does not have are empty."""
    columns = request_columns(outcome)
    lists = [column.tolist() for column in columns.values()]
    rows = (
        (number, *(None if each != each else each for each in row))  # noqa: PLR0124  (nan)
        for number, row in enumerate(zip(*lists, strict=True))
    )
    write_table(path, ("request", *columns), rows)


@sections_of.register(Outcome)
def simulation_sections(
    outcome: Outcome, slos: Mapping[str, SloSpec] | None = None
) -> list[Section | ChartRow]:
    """Return latencies beside the limits of an SLO, what was simulated, and the pools."""
    return [simulated_table(outcome, slos), pools_table(outcome)]


def simulated_table(outcome: Outcome, slos: Mapping[str, SloSpec] | None) -> Section:
    """
    Return one row per latency, with intervals and, of an SLO, the verdict.

    Latencies of each class of requests, where there are several, follow those of all requests.
    """
    whole = next(iter(slos.values())) if slos is not None and len(slos) == 1 else None
    groups: list[tuple[str, int | None, SloSpec | None]] = [("", None, whole)]
    if outcome.class_of.any():  # else a trace, or requests of one class
        groups += [(of, at, slo) for at, (of, slo) in enumerate((slos or {}).items())]
    heads = ("", *SHOWN) if slos is None else ("", *SHOWN, f"SLO{judged_at(slos)}")
    rows: list[list[str | Cell]] = []
    for of, at, slo in groups:
        latencies = outcome.latencies(at)
        gaps = at is None or (slo is not None and slo.itl_s is not None)  # those of all classes
        for name in (name for name in NAMES if name in latencies and (gaps or name != "itl")):
            values = (_with_interval(latencies[name][statistic]) for statistic in SHOWN)
            rows.append([f"{of} {NAMES[name]}".strip(), *values])
            if slo is not None:
                rows[-1].append(_verdict(outcome, name, slo, at))
    title, details = "Simulated latency, with 90 % intervals", ("mean", "p95", "p50")
    return table(title, heads, rows, details=details, notes=simulation_summary(outcome))


def pools_table(outcome: Outcome) -> Section:
    """Return one row per pool: share of the time that it computes, queue, batch, KV cache."""
    seen, rows = outcome.occupancy, []
    for role, capacity in outcome.kv_capacity_blocks.items():
        used = seen.kv_blocks[role] / capacity
        cells = [role, f"{outcome.busy_fraction[role]:.0%}"]
        for counts in (seen.waiting[role], seen.running[role]):
            cells += [f"{counts.mean():.1f}", f"{counts.max():.0f}"]
        rows.append([*cells, f"{used.mean():.0%}", f"{used.max():.0%}"])
    heads = ("pool", "computing", "waiting", "most", "running", "most", "KV used", "most")
    return table("Pools over time", heads, rows)


def simulation_summary(outcome: Outcome) -> list[str]:
    """Return what was simulated, what counts, and doubts about the run."""
    total, counted = len(outcome.due_s), int(outcome.counts.sum())
    counts = f"{total:,} requests at {_rate(outcome):.3g}/s, {counted:,} of them counted"
    lines = [f"{counts} (after the warm-up by MSER-5, before the last arrivals)"]
    if not outcome.settled:
        lines.append(
            "No steady state: latencies still change at the end, or the run is too short; its"
            " numbers describe this run only"
        )
    if outcome.cached_tokens.any():
        lines.append(f"{_cached_fraction(outcome):.0%} of the prompt tokens were in a prefix cache")
    if _offloaded(outcome):
        tiers = ", ".join(f"{share:.1%} {tier}" for tier, share in _by_tier(outcome).items())
        lines.append(f"by tier: {tiers}")
    if outcome.adapter_loads.any():
        lines.append(f"{_loads_per_request(outcome):.2g} copies of adapters a request")
    if outcome.preemptions.any():
        lines.append(f"{int(outcome.preemptions.sum()):,} preemptions for lack of KV cache")
    return lines


def _cached_fraction(outcome: Outcome) -> float:
    return float(outcome.cached_tokens.sum() / outcome.input_tokens.sum())


def _loads_per_request(outcome: Outcome) -> float:
    return float(outcome.adapter_loads.mean())


def _offloaded(outcome: Outcome) -> bool:
    return bool((outcome.host_tokens + outcome.disk_tokens).any())


def _by_tier(outcome: Outcome) -> dict[str, float]:
    """Share of all prompt tokens that was found on the GPUs, in host memory and on disk."""
    host, disk = outcome.host_tokens.sum(), outcome.disk_tokens.sum()
    found = {"gpu": outcome.cached_tokens.sum() - host - disk, "host": host, "disk": disk}
    return {tier: float(tokens / outcome.input_tokens.sum()) for tier, tokens in found.items()}


def hit_rate_table(rates: Sequence[HitRate], *, gpu_tokens: int, token_bytes: float) -> Section:
    """
    Return one row per capacity.

    Args:
        rates: from `hit_rates`.
        gpu_tokens: size of the KV cache of a replica, for comparison.
        token_bytes: per GPU.
    """
    rows = [
        (f"{tokens:,}", size(tokens * token_bytes), f"{tokens / gpu_tokens:g}", f"{share:.1%}")
        for tokens, share in rates
    ]
    heads = ("tokens a replica", "a GPU", "of its KV cache", "prompt tokens found")
    return table("Prefix hits by capacity (LRU)", heads, rows)


def _rate(outcome: Outcome) -> float:
    span_s = float(outcome.due_s.max() - outcome.due_s.min())
    return (len(outcome.due_s) - 1) / span_s if span_s else 0.0


def _with_interval(simulated: BatchMeansInterval) -> str:
    """Write a simulated value and its interval, which too few values do not have."""
    if simulated.low_s is None:
        return seconds(simulated.value_s)
    high = "more" if simulated.high_s is None else seconds(simulated.high_s)
    return f"{seconds(simulated.value_s)} ({seconds(simulated.low_s)} to {high})"


def _verdict(outcome: Outcome, name: str, slo: SloSpec, of: int | None) -> str | Cell:
    """Return whether a limit holds, surely or within sampling error."""
    limit_s, statistic = slo.limits_s.get(name), slo.percentile
    if limit_s is None:
        return ""
    missed = outcome.latencies(of)[name][statistic].value_s > limit_s
    if missed or outcome.surely_below(name, statistic, limit_s, of):
        return verdict(holds=not missed, limit=f"< {seconds(limit_s)} ")
    return Cell(f"< {seconds(limit_s)} holds, not surely", "open")
