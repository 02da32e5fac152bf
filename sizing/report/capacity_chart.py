"""The rates that numbers of GPUs carry, as a chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.pages.figure import BLUE, ORANGE, Figure, axes, axis, line, marks

if TYPE_CHECKING:
    from sizing.planner.studies.capacity import Capacity

HEADROOM = 1.1
"""How far the axes go beyond the largest value."""


def capacity_figure(found: Capacity, asked_per_s: float) -> Figure:
    """
    Draw the highest rate within the SLO over the number of GPUs.

    Args:
        asked_per_s: the scenario's own rate, as a line.
    """
    gpus = [point.gpus for point in found.points]
    rates = [point.requests_per_s for point in found.points]
    top, right = HEADROOM * max(*rates, asked_per_s), HEADROOM * max(gpus)
    hover = "%{x} GPUs: %{y:,.4g} requests/s<br>%{text}"
    said = ", ".join(f"{count} GPUs {rate:,.3g}" for count, rate in zip(gpus, rates, strict=True))
    return Figure(
        title="Capacity",
        caption=f"Requests/s within the SLO at {found.percentile} with"
        f" {found.confidence_fraction:.0%} confidence: {said}",
        traces=(
            marks("highest rate", gpus, rates, colour=BLUE, hover=hover, size=9, lines=True,
                  texts=[point.layout or point.reason for point in found.points]),
            line("this scenario", [0, right], [asked_per_s, asked_per_s], colour=ORANGE,
                 hover="%{y:,.4g} requests/s", dash="dot"),
        ),
        layout=axes(axis("GPUs", 0.0, right), axis("requests/s", 0.0, top)),
    )  # fmt: skip
