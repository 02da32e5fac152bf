"""
Speed of the simulation: requests per CPU second of a chat workload on split pools.

    python benchmarks/simulation_speed.py

4,000 tokens in, 500 out, ten times as many requests in the second run: the cost per request must
not grow. Step times are those of a 70B model on eight H100, rounded; the simulation's cost depends
on how many sequences a step holds hardly at all, and on the number of events a request makes.
"""

from __future__ import annotations

import statistics
import time

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.step import StepCoefficients
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.sources import RequestSource, drawn
from sizing.simulation.event_loop import EventLoop
from sizing.simulation.system import Path, SimulatedPool, System

STEP = StepCoefficients(
    base_s=3e-3,
    stream_s=7e-3,
    per_prefill_token_s=5e-5,
    per_sequence_s=3e-5,
    per_pair_s=1e-9,
    per_context_token_s=2e-8,
    max_tokens=8192,
    max_batch=256,
    max_context_tokens=8192,
    error_fraction=0.0,
)
LIMITS = EngineLimits(
    max_num_seqs=256, max_num_batched_tokens=8192, kv_blocks=60_000, block_size=16
)
TARGET = 20_000
"""Requests per CPU second, so that a search can afford to simulate its finalists."""

RUNS = 5


def system(scale: int) -> System:
    """Return *scale* times 5 prefill and 3 decode replicas."""
    pool = {"limits": LIMITS, "step": PlannedStep(STEP)}
    return System(
        prefill=SimulatedPool(replicas=5 * scale, **pool),
        decode=SimulatedPool(replicas=3 * scale, **pool),
        path=Path(request_s=0.02, transfer_base_s=2e-3, transfer_per_token_s=2e-6),
    )


def cpu_s(scale: int, count: int, seed: int) -> float:
    """CPU seconds of one run, drawing the requests included."""
    workload = WorkloadSpec(
        requests_per_s=19.0 * scale, input_tokens=Lengths.fixed(4000),
        output_tokens=Lengths.fixed(500),
    )  # fmt: skip
    start = time.process_time()
    EventLoop(
        system(scale), drawn(workload, RequestSource(), count=count, seed=seed), seed=seed
    ).run()
    return time.process_time() - start


def main() -> None:
    """Print requests per CPU second, median of five, for sizes of system and run."""
    for scale, count in ((1, 20_000), (1, 200_000), (10, 20_000)):
        runs = RUNS if count < 100_000 else 1  # noqa: PLR2004
        speed = count / statistics.median(cpu_s(scale, count, seed) for seed in range(runs))
        print(
            f"{5 * scale} + {3 * scale} replicas, {count:,} requests: {speed:,.0f} requests per"
            f" CPU second, {speed / TARGET:.1f} times the target"
        )


if __name__ == "__main__":
    main()
