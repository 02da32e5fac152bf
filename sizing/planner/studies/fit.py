"""Does it fit? The memory of a GPU by layout, and the sequences of a length that GPUs hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.parameters import parameters
from sizing.catalog.cluster import clusters
from sizing.catalog.gpu import find_gpu
from sizing.catalog.model import find_model
from sizing.catalog.scenario import scenario_from
from sizing.planner.layout import (
    kv_space,
    legal_shapes,
    max_decode_batch,
    memory_parts,
    memory_rule,
)
from sizing.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.config import Overrides
    from minicluster.plan import Inputs
    from sizing.planner.layout import LayoutShape

DOMAIN = 8
"""GPUs that scale-up links join where no preset of the GPU says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFit:
    """
    One layout of a model on a number of GPUs.

    Attributes:
        layout: of a replica, such as `TP4`.
        replicas: that the GPUs hold.
        parts_bytes: what the memory of its fullest GPU is divided into, by name (eq. M4); a KV
            cache below 0 is what is lacking.
        batch: sequences that all replicas hold at once, as many as the engine runs; 0: none fits.
        why_not: why none fits.
    """

    layout: str
    gpus: int
    replicas: int
    parts_bytes: dict[str, float]
    batch: int
    why_not: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """
    A model on a number of GPUs of one kind.

    Attributes:
        context_tokens: of every sequence, prompt and answer together; at most the model's own.
        layouts: all that divide the model, the narrowest first.
    """

    model: str
    num_parameters: int
    gpu: str
    gpus: int
    context_tokens: int
    max_context_tokens: int
    layouts: tuple[LayoutFit, ...]

    @property
    def best(self) -> LayoutFit | None:
        """Layout that holds the most sequences, the narrowest of equal ones; `None`: none fits."""
        fitting = [layout for layout in self.layouts if layout.batch]
        return max(fitting, key=lambda layout: layout.batch, default=None)


def fit(
    model: str, gpu: str, gpus: int, *, context_tokens: int, overrides: Overrides = ()
) -> ModelFit:
    """
    Return every layout of a model on *gpus* GPUs, with its memory and the sequences that it holds.

    Args:
        model, gpu: as `find_model` and `find_gpu` take them.
        context_tokens: of a sequence; a model that takes fewer gets its own limit.
        overrides: scenario keys, of `[model]` and `[engine]`.

    Raises:
        InputError: an unknown name, or no GPU.
    """
    inputs = _inputs(model, gpu, gpus, context_tokens, overrides)
    shapes = sorted(legal_shapes(inputs), key=lambda shape: (shape.gpus, shape.lanes))
    layouts = (_layout_fit(inputs, shape, gpus) for shape in shapes if shape.gpus <= gpus)
    return ModelFit(
        model=inputs.model.id,
        num_parameters=parameters(inputs.model).total,
        gpu=inputs.gpu.name,
        gpus=gpus,
        context_tokens=inputs.scenario.model.max_context_tokens or context_tokens,
        max_context_tokens=find_model(model).max_context_tokens,
        layouts=tuple(layouts),
    )


def _inputs(model: str, gpu: str, gpus: int, context_tokens: int, overrides: Overrides) -> Scenario:
    device = find_gpu(gpu, place="--gpu")
    if device.kind == "cpu":
        raise InputError("--gpu", gpu, "a GPU: a CPU has no memory of its own")
    presets = [preset for preset in clusters().values() if preset.gpu == device.name]
    domain = max((preset.gpus_per_hb_domain for preset in presets), default=DOMAIN)
    longest = min(context_tokens, find_model(model, place="MODEL").max_context_tokens)
    raw = {
        "model": {"id": model, "max_context_tokens": longest},
        "cluster": {
            "gpu": device.name,
            "gpus_per_node": min(gpus, domain),
            "max_gpus": gpus,
        },
        "workload": {"requests_per_s": 1.0, "input_tokens": longest - 1, "output_tokens": 1},
    }
    return Scenario.of(scenario_from(raw, overrides, place=model), model, None)


def _layout_fit(inputs: Inputs, shape: LayoutShape, gpus: int) -> LayoutFit:
    context = inputs.scenario.model.max_context_tokens or 1
    of_lane = max_decode_batch(inputs, shape, context=context, deviation=0.0)
    held = shape.lanes * of_lane
    kv_bytes = kv_space(inputs, shape, sequences=max(1, of_lane * shape.slicing.pp))
    replicas = gpus // shape.gpus
    utilization = inputs.engine_on(shape.gpu).gpu_memory_utilization
    return LayoutFit(
        layout=str(shape),
        gpus=shape.gpus,
        replicas=replicas,
        parts_bytes=memory_parts(inputs, shape, utilization, kv_bytes),
        batch=replicas * held,
        why_not=None if held else memory_rule(inputs, shape),
    )


def largest_first(fits: Sequence[ModelFit]) -> list[ModelFit]:
    """Return the models that fit, the largest first."""
    fitting = [model for model in fits if model.best is not None]
    return sorted(fitting, key=lambda model: -model.num_parameters)
