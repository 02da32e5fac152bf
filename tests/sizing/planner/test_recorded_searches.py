"""
Plans, and the simulations by which the search came to them, as recorded: a change of one is meant.

A search that simulates more for the same plan is slower, which no timed test can notice.
`python -m tests.sizing.planner.test_recorded_searches` records anew; the difference belongs into
the commit that changes the search, with its reason.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest

import sizing
from minicluster.workload.arrivals import Arrivals
from sizing.planner import simulated_check
from sizing.planner.studies.result import layout_of
from sizing.simulation.outcome import Outcome, simulate
from sizing.simulation.system import Decoding, System
from tests.sizing.conftest import left_with

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).with_suffix(".json")

SMALL, LARGE = "llama-3.1-8b-h100", "llama-3.1-70b-h100-2rps"
EXPERTS = "deepseek-v3-h200"


def lengths(median: int, high: int) -> dict[str, Any]:
    """Return prompts of which most are short and a few long."""
    return {"distribution": "lognormal", "median": median, "sigma": 1.5, "high": high}


SEARCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": (SMALL, {}),
    "small, split": (SMALL, {"search.pools": "split"}),
    "small, aggregated, busy": (SMALL, {"search.pools": "mixed", "workload.requests_per_s": 60}),
    "small, certain": (SMALL, {"search.confidence_fraction": 0.99}),
    "small, even chance": (SMALL, {"search.confidence_fraction": 0.5, "slo.percentile": "p50"}),
    "small, spares": (SMALL, {"search.spare_replicas": 1}),
    "small, long answers": (SMALL, {"workload.output_tokens": 3000, "slo.tpot_s": 0.012}),
    "small, end to end": (SMALL, {"slo.e2e_s": 5.0, "workload.requests_per_s": 30}),
    "small, gaps": (SMALL, {"slo.itl_s": 0.03, "workload.input_tokens": 4000}),
    "small, few sequences": (SMALL, {"engine.max_num_seqs": 16}),
    "small, too few GPUs": (SMALL, {"workload.requests_per_s": 300, "cluster.max_gpus": 8}),
    "small, too strict": (SMALL, {"slo.ttft_s": 0.01}),
    "small, by watts": (SMALL, {"search.objective": "watts", "search.pools": "split"}),
    "large": (LARGE, {}),
    "large, split": (LARGE, {"search.pools": "split"}),
    "large, fast": (LARGE, {"slo.tpot_s": 0.02, "workload.requests_per_s": 6}),
    "large, busy": ("llama-3.1-70b-h100", {}),
    "large, prompts of many lengths": (
        LARGE,
        {
            "workload.requests_per_s": 4,
            "workload.input_tokens": lengths(1000, 16_000),
            "workload.output_tokens": 200,
            "slo.ttft_s": 2,
            "slo.tpot_s": 0.1,
            "search.routing": "power-of-two",
            "search.pools": "split",
        },
    ),
    "two kinds of GPU": ("mixed-gpus-70b", {"workload.requests_per_s": 3}),
    "experts": (EXPERTS, {"workload.requests_per_s": 4, "search.pools": "split"}),
    "experts, aggregated": (EXPERTS, {"workload.requests_per_s": 4, "search.pools": "mixed"}),
    "experts, busy": (
        EXPERTS,
        {"workload.requests_per_s": 80, "search.pools": "split", "cluster.max_gpus": 1024},
    ),
    "experts, looked at again": (
        EXPERTS,
        {
            "workload.requests_per_s": 30,
            "search.pools": "split",
            "engine.redundant_experts": 32,
        },
    ),
    "small, prompts of many lengths": (
        SMALL,
        {
            "workload.requests_per_s": 60,
            "workload.input_tokens": lengths(1000, 16_000),
            "search.routing": "random",
            "search.pools": "split",
        },
    ),
    "small, most prompts short": (
        SMALL,
        {
            "workload.requests_per_s": 20,
            "workload.input_tokens": lengths(300, 8000),
            "workload.output_tokens": 100,
            "slo.ttft_s": 0.5,
            "slo.tpot_s": 0.1,
            "search.pools": "split",
        },
    ),
    "small, many": (
        SMALL,
        {"search.pools": "split", "workload.requests_per_s": 400, "cluster.max_gpus": 512},
    ),
    "large, any layout": (LARGE, {"search.layouts": "any", "workload.requests_per_s": 8}),
    "large, hurried": (
        LARGE,
        {
            "workload.requests_per_s": 15,
            "slo.percentile": "p90",
            "slo.ttft_s": 0.5,
            "cluster.max_gpus": 128,
        },
    ),
    "large, nearest miss": (
        LARGE,
        {"workload.requests_per_s": 15, "slo.ttft_s": 0.5, "slo.percentile": "p90"},
    ),
    "classes": ("chat-and-summaries-8b", {}),
}
"""Scenario and keys."""

STUDIES: dict[str, tuple[str, ...]] = {
    "capacity": ("capacity", SMALL, "--gpus", "2,6"),
    "capacity, large": ("capacity", LARGE, "--gpus", "16"),
    "split map": (
        *("split-map", SMALL, "--x", "workload.requests_per_s=5,40"),
        *("--y", "workload.input_tokens=500,4000"),
    ),
    "split map, even chance": (
        *("split-map", SMALL, "--set", "search.confidence_fraction=0.5"),
        *("--x", "workload.requests_per_s=30", "--y", "workload.input_tokens=2000"),
    ),
    "split map, links": ("split-map", LARGE, "--y", "workload.prefix_tokens=0,2000"),
    "capacity, split": ("capacity", SMALL, "--gpus", "4", "--set", "search.pools=split"),
    "compare": ("compare", SMALL, "--gpu", "h100-sxm,h200-sxm", "--set", "cost.prices=catalog"),
    "decisions": ("decisions", SMALL, "--only", "links"),
    "pareto": ("pareto", LARGE),
    "pareto, power": ("pareto", SMALL, "--by", "watts"),
    "sweep": ("sweep", SMALL, "--key", "slo.ttft_s=0.2,0.4"),
    "day": (
        *("day", SMALL, "--cold-start-seconds", "120", "--forecast-error", "0.1"),
        *("--profile", str(ROOT / "configs/profiles/sine-day.csv")),
    ),
    "day, large": (
        *("day", "llama-3.1-70b-h100", "--cold-start-seconds", "300"),
        *("--profile", str(ROOT / "configs/profiles/sine-day.csv")),
    ),
    "long context": ("long-context", "long-context-70b"),
}
"""Commands, whose JSON is recorded in short."""

MOST = 3
"""Items of a list that are recorded each; of longer lists the count, the ends and the sums."""


class Simulations:
    """The simulations of a search: their number and requests, and a digest of them in order."""

    def __init__(self) -> None:
        """Start without any."""
        self._runs: list[str] = []
        self._requests = 0

    def __call__(
        self, system: System, arrivals: Arrivals, *, seed: int, decoding: Decoding, **kept: int
    ) -> Outcome:
        """Simulate, and note it; *kept* is what its outcome keeps."""
        prefill = 0 if system.prefill is None else system.prefill.replicas
        replicas = f"{prefill} + {system.decode.replicas}"
        self._runs.append(f"{replicas} {len(arrivals)} {len(decoding.context_tokens)} {seed}")
        self._requests += len(arrivals)
        return simulate(system, arrivals, seed=seed, decoding=decoding, **kept)

    def __enter__(self) -> Self:
        """Take the place of the simulation that searches call."""
        self._patch = patch.object(simulated_check, "simulate", self)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._patch.stop()

    @property
    def noted(self) -> dict[str, Any]:
        """What is recorded."""
        digest = hashlib.sha256("\n".join(self._runs).encode()).hexdigest()[:12]
        return {"count": len(self._runs), "requests": self._requests, "digest": digest}


def searched(name: str) -> dict[str, Any]:
    """Return the plan of a case, or why there is none, and the simulations of its search."""
    scenario, keys = SEARCHES[name]
    with Simulations() as runs:
        try:
            found = sizing.plan(sizing.Scenario.load(scenario, keys))
        except sizing.NoPlan as none:
            return {"none": str(none), "simulated": runs.noted}
    return {
        "layout": layout_of(found),
        "batches": [pool.max_num_seqs for pool in found.pools],
        "ttft_s": found.prediction.ttft.at("p99"),
        "tpot_s": found.prediction.tpot.at("p99"),
        "bottleneck": found.prediction.bottleneck,
        "headroom": asdict(found.headroom),
        "by_confidence": asdict(found.confidence),
        "local_threshold_tokens": found.routing.local_threshold_tokens,
        "simulated": runs.noted,
    }


def studied(name: str) -> dict[str, Any]:
    """Return what a command answers, in short, and the simulations of its searches."""
    out = StringIO()
    with Simulations() as runs, redirect_stdout(out):
        assert left_with(*STUDIES[name], "--json") == 0
    return {"answer": shortened(json.loads(out.getvalue())), "simulated": runs.noted}


def shortened(value: object) -> object:
    """Return JSON in which long lists are their count, ends and sums."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) <= MOST:
        return [shortened(inner) for inner in value]
    short = {"count": len(value), "first": shortened(value[0]), "last": shortened(value[-1])}
    if all(isinstance(inner, int | float) for inner in value):
        short["sum"] = sum(value)
    return short


def close(found: object, recorded: object) -> bool:
    """Say whether two JSON values are the same, numbers to six digits."""
    if isinstance(recorded, float) and isinstance(found, float):
        return found == pytest.approx(recorded, rel=1e-6)
    if isinstance(recorded, dict) and isinstance(found, dict):
        return found.keys() == recorded.keys() and all(
            close(found[key], inner) for key, inner in recorded.items()
        )
    if isinstance(recorded, list) and isinstance(found, list):
        return len(found) == len(recorded) and all(map(close, found, recorded))
    return bool(found == recorded)


def read() -> dict[str, Any]:
    """Return what was recorded."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_are_those_recorded(name: str) -> None:
    found = json.loads(json.dumps(searched(name)))
    recorded = read()[name]
    different = [key for key in recorded if not close(found.get(key), recorded[key])]
    assert not different, {key: (found.get(key), recorded[key]) for key in different}


@pytest.mark.parametrize("name", STUDIES)
def test_studies_are_those_recorded(name: str) -> None:
    found, recorded = studied(name), read()[name]
    different = [key for key in recorded if not close(found[key], recorded[key])]
    assert not different, {key: (found[key], recorded[key]) for key in different}


if __name__ == "__main__":
    made = {name: searched(name) for name in SEARCHES}
    made |= {name: studied(name) for name in STUDIES}
    RECORDED.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
