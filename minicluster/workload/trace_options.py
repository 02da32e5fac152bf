"""What a user says of a trace file, as options of every command that reads one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from minicluster.specs.checks import Options, choice

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # Seconds of the units of times


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReading(Options):
    """
    What decides how a trace is read.

    Attributes:
        time_unit: of times that are numbers: s, ms, us or ns; `None`: what the file itself says.
        skip_images: leave out requests with images, audio or video instead of refusing them.
    """

    time_unit: Annotated[str, choice(*UNITS_S)] | None = None
    skip_images: bool = False


AS_FOUND = TraceReading()
TimeUnit = Annotated[
    str | None, Option(help="Unit of the trace's times: " + ", ".join(UNITS_S) + ".")
]
SkipImages = Annotated[
    bool, Option("--skip-images", help="Requests with images, audio or video left out.")
]
