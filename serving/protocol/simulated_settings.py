"""Settings of the replicas that have a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minicluster.engine_model.limits import EngineLimits
from minicluster.specs.step import PathCoefficients, StepSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """
    The engines of one pool; seconds are the plan's.

    Attributes:
        domain: of the pool; a KV cache is fetched from there.
        slowdown: seconds of the clock that each of them takes.
        limits: of each lane.
        lanes: batches of one replica, each with its own queue and KV cache.
        path: the way to an engine, and of KV caches between two.
        lease_s: for how long a prefill engine keeps a KV cache.
        model: name at the endpoint.
        source: directory of the model, which may hold a tokenizer.
        unasked_tokens: length of an answer that names none.
        facts: settings that the plan decides, as vLLM reports them.
        places: labels of the planned node of each replica, by its rank.
    """

    role: str
    domain: str
    slowdown: float
    limits: EngineLimits
    lanes: int
    step: StepSpec
    path: PathCoefficients
    lease_s: float
    model: str
    source: str
    vocab_size: int
    max_model_len: int
    unasked_tokens: int
    facts: dict[str, Any]
    places: tuple[dict[str, str], ...]
