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


def fit_sections(found: ModelFit) -> Iterator[Section]:
    """Yield the answer, and the memory of a GPU in each layout of a model."""
    best, layouts = found.best, found.layouts
    whole = sum(layouts[0].parts_bytes.values()) if layouts else 0.0
    memory = f"{gigabytes(whole)} ({whole / 2**30:.1f} GiB, as CUDA reports it)"
    where = f"{found.gpus} x {found.gpu}"
    answer = f"{found.model} does not fit {where}"
    if best is not None:
        answer = (
            f"{found.model} fits {where}: {best.batch:,} sequences of"
            f" {found.context_tokens:,} tokens as {best.replicas} x {best.layout}"
        )
    columns: dict[str, list[str | Cell]] = {
        "layout": [each.layout for each in layouts],
        "replicas": [str(each.replicas) for each in layouts],
    }
    for name in PARTS:
        columns[name] = [_size(each.parts_bytes[name]) for each in layouts]
    columns["sequences"] = [
        f"{each.batch:,}" if each.batch else Cell("no", "bad") for each in layouts
    ]
    note = (
        f"memory of the fullest GPU, of {memory}; sequences of {found.context_tokens:,} tokens in"
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
    best = [each.best for each in fitting]
    columns = {
        "model": [each.model for each in fitting],
        "billion\nparameters": [f"{each.num_parameters / 1e9:,.1f}" for each in fitting],
        "layout": [f"{each.replicas} x {each.layout}" for each in best if each],
        "weights\nper GPU": [_size(each.parts_bytes["weights"]) for each in best if each],
        "KV cache\nper GPU": [_size(each.parts_bytes["KV cache"]) for each in best if each],
        "sequences": [f"{each.batch:,}" for each in best if each],
        "of tokens": [f"{each.context_tokens:,}" for each in fitting],
    }
    names = [each.model for each in fits if each.best is None]
    notes = [f"do not fit: {', '.join(names)}"] if names else []
    title = f"{len(fitting)} of {len(fits)} models fit {first.gpus} x {first.gpu}"
    details = ("weights\nper GPU", "KV cache\nper GPU")
    yield columns_table(title, columns, details=details, notes=notes)
