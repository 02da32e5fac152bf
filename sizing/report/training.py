"""A training estimate as tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from minicluster.units import seconds
from sizing.report.tables import facts, size, table

if TYPE_CHECKING:
    from minicluster.pages.page import Section
    from sizing.training.estimate import TrainingEstimate
    from sizing.training.job import TrainingLayout
    from sizing.training.search import Trial

JOULES_PER_MWH = 3.6e9


def degrees(layout: TrainingLayout) -> str:
    """Write the degrees of a layout in short."""
    named = ("tp", "cp", "pp", "dp", "ep")
    degrees_of = ((name.upper(), getattr(layout, name)) for name in named)
    parts = [f"{name}{value}" for name, value in degrees_of if value > 1] or ["one GPU"]
    tail = f", micro-batch {layout.micro_batch}"
    if layout.pp > 1:
        tail += f", {layout.interleave} chunks a stage"
    return " ".join(parts) + tail


def layouts_table(ranked: list[Trial]) -> Section:
    """Return one row per layout, the fastest first."""
    rows = (
        (degrees(trial.layout), seconds(trial.step_s), size(trial.memory_bytes)) for trial in ranked
    )
    return table("Layouts", ("layout", "step", "memory a GPU"), rows)


def training_table(found: TrainingEstimate) -> Section:
    """Return all figures of one layout."""
    parts = ", ".join(f"{name} {size(value)}" for name, value in asdict(found.memory).items())
    fits = "fits" if found.fits else "does not fit"
    memory = f"{size(found.memory_bytes)} a GPU, {fits} {size(found.hbm_bytes)}: {parts}"
    achieved = (
        f"{found.flops_per_gpu_per_s / 1e12:.0f} TFLOP/s a GPU,"
        f" HFU {found.hfu_fraction:.1%}, MFU {found.mfu_fraction:.1%}"
    )
    rows = [
        ("layout", degrees(found.layout)),
        ("parameters", f"{found.parameters / 1e9:,.2f} billion"),
        ("step", f"{seconds(found.step_s)} for {found.tokens_per_step:,} tokens"),
        ("of it", _shares(found)),
        ("achieved", achieved),
        ("scale factor", f"{found.scale_factor:.3f} of linear, against one replica"),
        ("memory", memory),
    ]
    if found.days is not None and found.gpu_hours is not None and found.energy_j is not None:
        run = (
            f"{found.days:.1f} days, {found.gpu_hours:,.0f} GPU-hours,"
            f" {found.energy_j / JOULES_PER_MWH:,.0f} MWh of GPUs at their limit"
        )
        rows.append(("run", run))
    if found.failures is not None:
        failures = found.failures
        text = (
            f"one in {failures.job_mtbf_s / 3600:.2f} h, checkpoint every"
            f" {failures.checkpoint_interval_s / 60:.1f} min,"
            f" {failures.effective_fraction:.1%} effective"
        )
        rows.append(("failures", text + (f", {failures.days:.1f} days" if failures.days else "")))
    return facts(f"Training on {found.gpus:,} GPUs", rows)


def _shares(found: TrainingEstimate) -> str:
    shown = {
        key.removesuffix("_s"): value / found.step_s
        for key, value in asdict(found.step).items()
        if key not in ("step_s", "recompute_s", "replica_s")
    }
    ordered = sorted(shown.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in ordered if share)
