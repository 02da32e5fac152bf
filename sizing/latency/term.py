"""The terms of a step: what they are made of, on which machine, and how two halves overlap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minicluster.specs.cluster import ClusterSpec
from minicluster.specs.engine import EngineProfile
from minicluster.specs.gpu import GpuSpec
from minicluster.specs.model import ModelSpec
from sizing.latency.roofline import efficiency_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minicluster.plan import Inputs
    from minicluster.specs.efficiency import GpuEfficiency

Numbers = NDArray[np.float64] | float
"""An array of the shape of a step's load, or 0.0 where a term has no such part."""

AMOUNTS = (
    *("seconds", "compute_s", "memory_s", "network_s", "launch_s", "flops", "hbm_bytes"),
    "hidden_s",
)
"""Numbers of a term that add up."""

BOUNDS = ("compute", "memory bandwidth", "network", "launch")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The setting of a step: one model on one kind of GPU in one cluster under one engine."""

    model: ModelSpec
    gpu: GpuSpec
    cluster: ClusterSpec
    engine: EngineProfile

    @classmethod
    def of(cls, inputs: Inputs, gpu: str | None = None) -> Machine:
        """Return what a scenario's replicas run on; without *gpu* on the cluster's own kind."""
        kind = inputs.gpu if gpu is None else inputs.kinds[gpu]
        engine = inputs.engine.on(kind)
        return cls(model=inputs.model, gpu=kind, cluster=inputs.cluster, engine=engine)

    @cached_property
    def efficiency(self) -> GpuEfficiency:
        """The efficiencies of the GPU with the kernels of the engine."""
        return efficiency_of(self.gpu).of_engine(self.engine.name, self.engine.kernels)


@dataclass(frozen=True, slots=True)
class Term:
    """
    One term of a step.

    Attributes:
        seconds: of all its runs in the step.
        compute_s: if only compute bound it; `memory_s` and `network_s` likewise.
        launch_s: fixed part, whatever the size.
        flops: on one GPU.
        hbm_bytes: on one GPU.
        dtype: that it multiplies in; empty where it multiplies nothing.
        hidden_s: of it behind other terms, not in `seconds`.
    """

    name: str
    equation: str
    seconds: NDArray[np.float64]
    compute_s: Numbers = 0.0
    memory_s: Numbers = 0.0
    network_s: Numbers = 0.0
    launch_s: Numbers = 0.0
    flops: Numbers = 0.0
    hbm_bytes: Numbers = 0.0
    dtype: str = ""
    hidden_s: Numbers = 0.0

    def scaled(self, repeats: Numbers) -> Term:
        """Return the term of so many runs."""
        parts = {name: repeats * getattr(self, name) for name in AMOUNTS}
        return replace(self, **parts)

    def plus(self, other: Term) -> Term:
        """Return the sum with another term of the same name."""
        return replace(
            self, **{name: getattr(self, name) + getattr(other, name) for name in AMOUNTS}
        )

    def where(self, mask: NDArray[np.bool_], other: Term) -> Term:
        """Return this term in the steps of *mask*, and another one of the same name elsewhere."""
        parts: dict[str, Any] = {
            name: np.where(mask, getattr(self, name), getattr(other, name)) for name in AMOUNTS
        }
        return replace(self if mask.any() else other, **parts)

    @property
    def bound(self) -> str:
        """The largest of `BOUNDS` in this term; arrays are summed first."""
        parts = (self.compute_s, self.memory_s, self.network_s, self.launch_s)
        return BOUNDS[int(np.argmax([np.sum(part) for part in parts]))]


DISPATCH, COMBINE = "expert dispatch", "expert combine"
"""Terms that are overlapped."""

EXPERTS = ("experts up", "experts down", "engine per expert layer")
"""Terms between a dispatch and its combine."""


def overlapped(
    half: Iterable[Term], *, layers: int, expert_layers: int, on_sms: bool
) -> tuple[Term, ...]:
    """
    Return the terms of both halves of a step, as they run through the layers in turn.

        t = 2 (L a + L_e e) + L_e ((D - a)+ + (D - e)+ + (C - e)+ + (C - a)+) + min(a, C),
        (x)+ = max(0, x): per layer with experts the sum of max(a, D), max(e, D), max(e, C) and
        max(a, C)      (docs/model.md, eq. S11)

    a and e are what one half computes of a layer without its experts and of these, D and C its
    dispatch and combine. The GPU computes a, a, e, e of the two halves in turn; D of each starts
    when its a is done, C when its e is, and communication runs in the same order.

    Args:
        half: terms of a step with half of the load, those of all layers alone.
        layers: of the model; a is the mean over them.
        on_sms: whether the fixed parts of D and C are on the SMs: they then count to a and e.

    Returns:
        The same terms, twice as long; of dispatch and combine what compute does not hide.

    Source:
        The order of vLLM 0.29.0 model_executor/layers/fused_moe/prepare_finalize (a half yields
        before its dispatch and its combine) and of SGLang 0.5 batch_overlap/operations_strategy.
        Between slots every op waits for both of the slot before, so that the longest path is the
        sum of the longer ones: docs/model.md.

    Ignores:
        Compute that is slower while the network writes to the same memory; shared experts beside a
        combine; layers that differ from the mean one; halves that differ.
    """
    terms = {term.name: term for term in half}

    def per_layer(*names: str, repeats: int) -> NDArray[np.float64]:
        return np.asarray(sum(terms[name].seconds for name in names if name in terms)) / repeats

    exchanged = (DISPATCH, COMBINE)
    own_s = [np.asarray(terms[name].launch_s * on_sms) / expert_layers for name in exchanged]
    names = [name for name in terms if name not in {*exchanged, *EXPERTS}]
    attention_s = per_layer(*names, repeats=layers) + own_s[0]
    experts_s = per_layer(*EXPERTS, repeats=expert_layers) + own_s[1]
    for name, own in zip(exchanged, own_s, strict=True):
        sent_s = per_layer(name, repeats=expert_layers) - own
        beside = sum(np.maximum(0.0, sent_s - each_s) for each_s in (attention_s, experts_s))
        last_s = np.minimum(attention_s, sent_s) if name == COMBINE else 0.0
        terms[name] = _exposed(terms[name], expert_layers * (2 * own + beside) + last_s)
    return tuple(term if term.name in exchanged else term.scaled(2.0) for term in terms.values())


def _exposed(term: Term, seconds: NDArray[np.float64]) -> Term:
    """Return a term of both halves of which only so many seconds are not hidden behind others."""
    whole = 2 * np.where(term.seconds > 0, term.seconds, 1.0)
    left = term.scaled(2 * seconds / whole)
    return replace(left, equation="S11", seconds=seconds, hidden_s=2 * term.seconds - seconds)
