"""The verdict's measurement as a benchmark report of llm-d, for tools that collect these."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadtest.verdict.verdict import Judged
    from minicluster.stats.quantiles import LatencySummary

SCHEMA_VERSION = "0.2.1"
LATENCIES = {
    "ttft": ("time_to_first_token", "s"),
    "tpot": ("time_per_output_token", "s/token"),
    "itl": ("inter_token_latency", "s/token"),
    "e2e": ("request_latency", "s"),
}
"""Names and units there; TPOT and ITL are without the first token, as here."""


def to_llm_d(judged: Judged) -> str:
    """
    Return the report of a run, over the requests of the window that were answered.

    Source: llm-d-benchmark, br_v0_2_1_json_schema.json, read 2026-11-25.

    Ignores: What the schema has no place for: the SLO, its verdict and the prediction, which
    `verdict.json` has; a sentence with the verdict is the description.
    """
    run, verdict = judged.run, judged.verdict
    told, rates = verdict.metadata, verdict.throughput
    began = {}
    if told.started_unix_s:  # 0: not known, of an imported run
        began = {"start": datetime.fromtimestamp(told.started_unix_s, UTC).isoformat()}
    total = sum(verdict.outcomes.values())
    answered = verdict.outcomes.get("ok", 0)
    in_flight = verdict.outcomes.get("unfinished", 0)
    lengths = [(s.input_tokens or 0, s.output_tokens or 0) for s in run.measured if s.ok]
    prompts, answers = (
        (list(column) for column in zip(*lengths, strict=True)) if lengths else ([], [])
    )
    performance = {
        "requests": {
            "total": total,
            "failures": total - answered - in_flight,
            "input_length": _mean(prompts, "count"),
            "output_length": _mean(answers, "count"),
        },
        "latency": {
            name: _statistics(verdict.latency.get(metric), unit)
            for metric, (name, unit) in LATENCIES.items()
        },
        "throughput": {
            "request_rate": {"units": "queries/s", "mean": rates.answered_requests_per_s},
            "output_token_rate": {"units": "tokens/s", "mean": rates.output_tokens_per_s},
        },
    }
    load = {
        "metadata": {},
        "native": {"args": {"seed": told.seed, "host": told.host}},
        "standardized": {
            "tool": "minicluster loadtest",
            "tool_version": version("minicluster"),
            "source": "random",
            "input_seq_len": {"distribution": "other", "value": _of_all(prompts)},
            "output_seq_len": {"distribution": "other", "value": _of_all(answers)},
            "rate_qps": rates.offered_requests_per_s,
        },
    }
    report = {
        "version": SCHEMA_VERSION,
        "run": {
            "uid": f"{told.model}-{told.started_unix_s:.3f}-{run.job.prompt_salt}",
            "time": {**began, "duration": f"PT{told.wall_s:.3f}S"},
            "description": " ".join((verdict.verdict.upper(), *verdict.reasons, *told.caveats)),
        },
        "scenario": {"load": load},
        "results": {"request_performance": {"aggregate": performance}},
    }
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _statistics(summary: LatencySummary | None, unit: str) -> dict[str, Any] | None:
    if summary is None:
        return None
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    return {"units": unit, **{name: summary.at(name) for name in names}}


def _mean(values: list[int], unit: str) -> dict[str, Any] | None:
    if not values:
        return None
    return {"units": unit, "mean": _of_all(values), "min": min(values), "max": max(values)}


def _of_all(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
