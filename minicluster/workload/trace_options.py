"""What a user says of a trace file, as options of every command that reads one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from minicluster.specs.checks import Count, Options, choice
from minicluster.workload.trace_formats import FORMATS

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of the units of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReading(Options):
    """
    What decides how a trace is read; `None`: what the file itself says, or it is refused.

    Attributes:
        format: one of `minicluster.workload.trace_formats.FORMATS`.
        time_unit: unit of times that are numbers: s, ms, us or ns.
        block_tokens: tokens of the blocks that `hash_ids` name.
        skip_images: leave out requests with images, audio or video instead of refusing them.
    """

    format: Annotated[str, choice(*FORMATS)] | None = None
    time_unit: Annotated[str, choice(*UNITS_S)] | None = None
    block_tokens: Count | None = None
    skip_images: bool = False


Format = Annotated[
    str | None, Option("--format", help="Format of the trace: " + ", ".join(FORMATS) + ".")
]
TimeUnit = Annotated[
    str | None, Option(help="Unit of the trace's times: " + ", ".join(UNITS_S) + ".")
]
BlockTokens = Annotated[int | None, Option(help="Tokens of a block that hash_ids name.")]
SkipImages = Annotated[
    bool, Option("--skip-images", help="Requests with images, audio or video left out.")
]
