"""Labels from coarse to fine: what makes predictions err alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.specs.model import ModelSpec


def path_of(load: str, engine: str, model: ModelSpec) -> tuple[str, ...]:
    """
    Labels of a prediction: whether others wait, engine, load, kind of model, architecture.

    Args:
        load: `static`, `closed`, `closed, fixed lengths`, `open` or `split`.
        engine: name.
        model: its architecture; names differ between repositories of the same weights.

    """
    kind = "mla" if model.mla else "moe" if model.moe else "dense"
    shape = f"{model.num_layers} layers of {model.hidden_size}"
    crowd = "alone" if load == "static" else "loaded"
    return (crowd, engine.lower(), load, kind, shape)
