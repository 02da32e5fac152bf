"""docs/training.md: published training runs beside our estimates of them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sizing.training.estimate import estimate
from sizing.training.request import TrainingRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sizing.training.estimate import TrainingEstimate

RUNS = Path(__file__).parents[1] / "tests" / "published" / "training.toml"
KEYS = {key.name for key in fields(TrainingRequest)}
GIB = 2.0**30
PLAIN_RATIO = 4
QUANTITIES: dict[str, tuple[str, float, Callable[[TrainingEstimate], float]]] = {
    "step_s": ("step, s", 1.0, lambda found: found.step_s),
    "flops_per_gpu_per_s": ("TFLOP/s a GPU", 1e12, lambda found: found.flops_per_gpu_per_s),
    "tokens_per_gpu_per_s": ("tokens/s a GPU", 1.0, lambda found: found.tokens_per_s / found.gpus),
    "memory_gib": ("memory, GiB", 1.0, lambda found: found.memory_bytes / GIB),
    "activation_gib": ("activations, GiB", 1.0, lambda found: found.memory.activations / GIB),
}
"""Published quantities of a run: heading, conversion of our unit, and our value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """
    One published run.

    Attributes:
        group: table of tests/published/training.toml that it is in.
        keys: as `sizing train` takes them.
        published: by name of `QUANTITIES`.
        tolerance: of the group; `None`: shown, not asserted.
    """

    group: str
    name: str
    keys: dict[str, Any]
    published: dict[str, float]
    tolerance: float | None

    def estimate(self) -> TrainingEstimate:
        """Estimate it as `sizing train` does."""
        request = TrainingRequest(**self.keys)
        machine = request.machine()
        return estimate(*request.settled(machine), machine, tokens=request.tokens)

    def errors(self) -> dict[str, float]:
        """Return ours over published, less 1, by quantity."""
        found = self.estimate()
        return {
            name: QUANTITIES[name][2](found) / value - 1 for name, value in self.published.items()
        }


def groups() -> dict[str, Any]:
    """Return the tables as they stand in the file."""
    return tomllib.loads(RUNS.read_text(encoding="utf-8"))


def runs() -> Iterator[Run]:
    """Yield every published run; a shape without a feed-forward's width is a GPT, 4 h wide."""
    for group, table in groups().items():
        for row in table["rows"]:
            keys = table["keys"] | {key: value for key, value in row.items() if key in KEYS}
            if "hidden" in keys and "ffn" not in keys:
                keys["ffn"] = PLAIN_RATIO * keys["hidden"]
            yield Run(
                group=group,
                name=row["name"],
                keys=keys,
                published={key: row[key] for key in QUANTITIES if key in row},
                tolerance=table.get("tolerance_fraction"),
            )


def rows() -> Iterator[dict[str, Any]]:
    """Yield each published quantity beside our estimate, in the quantity's own unit."""
    for run in runs():
        found = run.estimate()
        at = found.layout
        layout = f"{found.gpus:,} {run.keys['gpu'].upper()}, TP{at.tp} PP{at.pp} DP{at.dp}"
        layout += f" CP{at.cp}" * (at.cp > 1) + f" EP{at.ep}" * (at.ep > 1)
        layout += f", {run.keys.get('recompute', 'none')} recompute"
        for name, value in run.published.items():
            heading, unit, ours = QUANTITIES[name]
            yield {
                "group": run.group,
                "name": run.name,
                "layout": layout,
                "quantity": heading,
                "published": value / unit,
                "predicted": ours(found) / unit,
                "error": ours(found) / value - 1,
            }
