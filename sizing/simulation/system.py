"""The simulated system: pools, the path between them, and the routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.engine_model.limits import EngineLimits, LoraLimits, OffloadLimits
from minicluster.engine_model.step_seconds import StepTime
from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Spec, Whole

if TYPE_CHECKING:
    from minicluster.workload.arrivals import Arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPool(Spec):
    """
    Equal replicas of one role.

    Attributes:
        gpus: of one replica; their uplinks carry its pulls.
        group: replicas that step together, as the data-parallel ranks of a group do (eq. Q11).
        prefix_cache: a replica finds earlier turns of a conversation and blocks of equal content.
        offload: it also finds these in host memory and on disk (eq. Q14); `None`: on GPUs alone.
        lora: slots for adapters (eq. Q15); `None`: requests name none.
    """

    replicas: Count
    limits: EngineLimits
    step: StepTime
    gpus: Count = 1
    group: Count = 1
    prefix_cache: bool = False
    offload: OffloadLimits | None = None
    lora: LoraLimits | None = None

    def _check(self) -> None:
        """Refuse steps that take no time, too: nothing would ever pass."""
        if self.replicas % self.group:
            raise InputError("replicas", self.replicas, f"whole groups of {self.group}")
        if not (self.step.decode_line(1)[0] > 0 and self.step.step_s([(1, 0)], 0, 0) > 0):
            raise InputError("step_model", 0.0, "steps that take more than 0 seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """
    Sequences that decode when a run begins, so that it begins near its steady state.

    Attributes:
        context_tokens: tokens that each has cached, shape (k,).
        remaining_tokens: tokens that each still generates, shape (k,).
    """

    context_tokens: NDArray[np.int64]
    remaining_tokens: NDArray[np.int64]


def steady_decoding(arrivals: Arrivals, count: int, *, seed: int) -> Decoding:
    """
    Draw sequences as a look at a steady state finds them (docs/model.md, eq. Q7).

    A long answer is met more often than it is drawn, at any of its tokens alike.
    """
    rng = np.random.default_rng((seed, count))
    outputs = arrivals.output_tokens
    met = rng.choice(len(outputs), size=count, p=outputs / outputs.sum())
    done = (rng.random(count) * outputs[met]).astype(np.int64)
    return Decoding(
        context_tokens=arrivals.input_tokens[met] + done, remaining_tokens=outputs[met] - done
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Path(Spec):
    """
    Seconds of a request outside steps.

    Attributes:
        request_s: ingress and routing, before a replica is chosen.
        request_spread_s: mean of what every answer takes beyond that, exponential.
        transfer_base_s: fixed part of a pull, which holds no NIC.
        transfer_per_token_s: part of a pull per token, which holds the NICs of both replicas: they
            carry one pull at a time, in order.
        uplink_per_token_s: part of a pull per token that the uplinks of one GPU would take; those
            of all GPUs of a pool carry it together. 0: uplinks never bind.
        handshake_s: additional part of the first pull between two replicas.
    """

    request_s: NotNegative = 0.0
    request_spread_s: NotNegative = 0.0
    transfer_base_s: NotNegative = 0.0
    transfer_per_token_s: NotNegative = 0.0
    uplink_per_token_s: NotNegative = 0.0
    handshake_s: NotNegative = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class System(Spec):
    """
    A deployment.

    Attributes:
        decode: the pool that answers; without *prefill* it does everything.
        prefill: the pool that computes prompts, `None` in an aggregated deployment.
        decode_policy: how the endpoint chooses among *decode*, once a prompt is prefilled.
        prefill_policy: how it chooses among *prefill*.
        local_threshold_tokens: prompts up to this length are computed by a decode replica.
    """

    decode: SimulatedPool
    prefill: SimulatedPool | None = None
    path: Path
    decode_policy: str = "power-of-two"
    prefill_policy: str = "power-of-two"
    local_threshold_tokens: Whole = 0
