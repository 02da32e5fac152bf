"""Services and pools that tests of queues wait for."""

from __future__ import annotations

import numpy as np

from minicluster.plan import StepModel
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients
from minicluster.specs.workload import Lengths, WorkloadSpec
from sizing.queueing.spread import (
    CENTRES,
    STANDARD_NORMAL,
    WEIGHTS,
    LatencyQuantiles,
    constant,
    spread,
)
from sizing.queueing.stage import PoolStage, TandemLoad

LOGNORMAL = LatencyQuantiles(values=np.exp(0.8326 * STANDARD_NORMAL))  # coefficient of variation 1
SERVICES = {
    "fixed": constant(1.0),
    "exponential": spread(-np.log(1 - CENTRES), WEIGHTS),
    "lognormal": LOGNORMAL.scaled(1 / LOGNORMAL.mean),
}

STEP = StepCoefficients(
    base_s=0.004, stream_s=0.006, per_prefill_token_s=5e-5, per_sequence_s=2e-4, per_pair_s=2e-9,
    per_context_token_s=3e-8, max_tokens=8192, max_batch=256, max_context_tokens=8192,
    error_fraction=0.0,
)  # fmt: skip
PATH = PathCoefficients(
    request_s=0.01, transfer_base_s=0.002, transfer_per_token_s=3e-6, error_fraction=0.0
)


def tandem(  # noqa: PLR0913  (what the tests vary)
    rate: float = 6.0,
    *,
    prefill: int = 1,
    decode: int = 1,
    batch: int = 64,
    inputs: Lengths | None = None,
    outputs: Lengths | None = None,
    interference: Interference | None = None,
) -> TandemLoad:
    """Return pools under a load: prompts of about 1,500 tokens, answers of about 60."""
    return TandemLoad(
        workload=WorkloadSpec(
            requests_per_s=rate,
            input_tokens=inputs or Lengths(distribution="uniform", low=1000, high=2000),
            output_tokens=outputs or Lengths(distribution="uniform", low=20, high=100),
        ),
        step_model=StepModel(
            prefill=STEP, decode=STEP, path=PATH, interference=interference or Interference()
        ),
        prefill=PoolStage(replicas=prefill, max_batch_size=1, max_batched_tokens=8192),
        decode=PoolStage(replicas=decode, max_batch_size=batch, max_batched_tokens=8192),
    )
