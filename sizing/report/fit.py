"""What fits: the memory of a GPU by layout, and the models that a number of GPUs holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.page import Cell
from minicluster.units import gigabytes
from sizing.planner.studies.fit import largest_first
from sizing.report.tables import columns_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minicluster.pages.page import Section
    from sizing.planner.studies.fit import ModelFit

PARTS = ("weights", "activations and engine", "KV cache", "left to others")


def fit_sections(fit: ModelFit) -> Iterator[Section]:
    """Yield the answer, and the memory of a GPU in each layout of a model."""
    best, layouts = fit.best, fit.layouts
    whole = sum(layouts[0].parts_bytes.values()) if layouts else 0.0
    memory = f"{gigabytes(whole)} ({whole / 2**30:.1f} GiB, as CUDA reports it)"
    where = f"{fit.gpus} x {fit.gpu}"
    answer = f"{fit.model} does not fit {where}"
    if best is not None:
        answer = (
            f"{fit.model} fits {where}: {best.batch:,} sequences of"
            f" {fit.context_tokens:,} tokens as {best.replicas} x {best.layout}"
        )
    columns: dict[str, list[str | Cell]] = {
        "layout": [layout.layout for layout in layouts],
        "replicas": [str(layout.replicas) for layout in layouts],
    }
    for name in PARTS:
        columns[name] = [_size(layout.parts_bytes[name]) for layout in layouts]
    columns["sequences"] = [
        f"{layout.batch:,}" if layout.batch else Cell("no", "bad") for layout in layouts
    ]
    note = (
        f"memory of the fullest GPU, of {memory}; sequences of {fit.context_tokens:,} tokens in"
        " all replicas at once, as many as the engine runs. Whether an SLO holds is another"
        " question: sizing plan, or sizing capacity"
    )
    details = ("left to others", "replicas")
    yield columns_table(answer, columns, details=details, notes=[note] if layouts else [])


def _size(value: float) -> str:
    return gigabytes(value) if value >= 0 else f"lacks {gigabytes(-value)}"


def models_sections(fits: Sequence[ModelFit]) -> Iterator[Section]:
    """Yield the models that fit, the largest first, and the names of the others."""
    first, fitting = fits[0], largest_first(fits)
    best = [fit.best for fit in fitting]
    columns = {
        "model": [fit.model for fit in fitting],
        "billion\nparameters": [f"{fit.num_parameters / 1e9:,.1f}" for fit in fitting],
        "layout": [f"{layout.replicas} x {layout.layout}" for layout in best if layout],
        "weights\nper GPU": [_size(layout.parts_bytes["weights"]) for layout in best if layout],
        "KV cache\nper GPU": [_size(layout.parts_bytes["KV cache"]) for layout in best if layout],
        "sequences": [f"{layout.batch:,}" for layout in best if layout],
        "of tokens": [f"{fit.context_tokens:,}" for fit in fitting],
    }
    names = [fit.model for fit in fits if fit.best is None]
    notes = [f"do not fit: {', '.join(names)}"] if names else []
    title = f"{len(fitting)} of {len(fits)} models fit {first.gpus} x {first.gpu}"
    details = ("weights\nper GPU", "KV cache\nper GPU")
    yield columns_table(title, columns, details=details, notes=notes)
