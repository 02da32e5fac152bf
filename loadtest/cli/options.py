"""The options of `loadtest run` that say how requests come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadtest.run.schedule import ArrivalShape
from loadtest.run.stages import parse_stages
from minicluster.workload.sources import PROCESSES, RequestSource

Gaps = Annotated[
    str, typer.Option("--arrivals", help=f"Gaps between requests: {', '.join(PROCESSES)}.")
]
GapCv = Annotated[
    float | None,
    typer.Option(help="Variation of gamma gaps (standard deviation / mean); above 1: bursts."),
]
Users = Annotated[
    int | None, typer.Option(help="Closed loop: so many users, each waiting for its answer.")
]
Turns = Annotated[
    int, typer.Option(help="Turns of a conversation; each holds what was said before.")
]
Think = Annotated[float, typer.Option(help="Seconds from an answer to the next turn or request.")]
Stages = Annotated[
    str | None, typer.Option(help="Rates that change: 5x60,10-40x120 (a-b is a ramp, x seconds).")
]
Trace = Annotated[
    Path | None, typer.Option(help="Arrivals and lengths: Azure, BurstGPT, Mooncake or own.")
]
PrefixTokens = Annotated[
    int | None,
    typer.Option(
        help="The same first tokens of every prompt; without a plan. Else nothing is cached."
    ),
]
SkipUnanswered = Annotated[
    bool,
    typer.Option("--skip-unanswered", help="Leave out requests of a trace that have 0 tokens."),
]
Api = Annotated[
    str, typer.Option(help="What is asked for: completions (of token ids) or chat (words).")
]
Processes = Annotated[int, typer.Option(help="Client processes, which share the schedule.")]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Take any certificate of an https host, and show it no key."),
]
Timeout = Annotated[
    float | None,
    typer.Option(help="Seconds to give a request; if not said, 10 x what the SLO allows it."),
]


def shape_of(
    source: tuple[str, float | None],
    *,
    users: int | None,
    turns: int,
    think_s: float,
    stages: str | None,
    skip_unanswered: bool,
) -> ArrivalShape:
    """
    Return what the options say; *source* is the gaps' distribution and variation.

    Raises:
        InputError: they do not go together.
    """
    process, gap_cv = source
    return ArrivalShape(
        source=RequestSource(
            process=process, gap_cv=gap_cv, users=users, turns=turns, think_s=think_s
        ),
        stages=parse_stages(stages) if stages is not None else (),
        skip_unanswered=skip_unanswered,
    )


def told_elsewhere(*, users: int | None, stages: str | None, trace: Path | None) -> dict[str, str]:
    """Return options that say nothing beside users, stages or a trace, each with what says it."""
    if trace:
        own = ("--rate", "--input-tokens", "--output-tokens", "--prefix-tokens")
        return dict.fromkeys(own, "--trace")
    if users is None and stages is None:
        return {}
    return {"--rate": "--stages" if users is None else "--users"}
