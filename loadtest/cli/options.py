"""The options of `loadtest run` that describe the arrivals, and the load without a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadtest.run.schedule import ArrivalShape
from loadtest.run.stages import parse_stages
from minicluster.workload.sources import PROCESSES, RequestSource

Gaps = Annotated[
    str,
    typer.Option("--arrivals", help=f"Distribution of arrival gaps: {', '.join(PROCESSES)}."),
]
GapCv = Annotated[
    float | None,
    typer.Option(help="Coefficient of variation of gamma gaps; bursts above 1."),
]
Users = Annotated[
    int | None,
    typer.Option(help="Users of a closed loop, each with one request at a time."),
]
Turns = Annotated[
    int, typer.Option(help="Turns per conversation; each prompt contains the earlier turns.")
]
Think = Annotated[
    float, typer.Option(help="Seconds between an answer and the next turn or request.")
]
Stages = Annotated[
    str | None,
    typer.Option(help="Changing rates: 5x60,10-40x120 (requests/s x seconds; a-b is a ramp)."),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Trace with arrivals and lengths: Azure, BurstGPT, Mooncake or schedule."),
]
PrefixTokens = Annotated[
    int | None,
    typer.Option(help="Common first tokens of all prompts, which may be cached; without a plan."),
]
SkipUnanswered = Annotated[
    bool,
    typer.Option("--skip-unanswered", help="Trace requests with 0 output tokens left out."),
]
Api = Annotated[str, typer.Option(help="Endpoint API: completions (token ids) or chat (words).")]
Processes = Annotated[int, typer.Option(help="Client processes that share the schedule.")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Certificate of the endpoint not checked, and no API key sent."
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(help="Time limit of a request in seconds; by default 10 x what the SLO allows."),
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
    Return the arrival shape; *source* is the distribution of gaps and its variation.

    Raises:
        InputError: options that exclude each other.
    """
    process, gap_cv = source
    return ArrivalShape(
        source=RequestSource(
            process=process, gap_cv=gap_cv, users=users, turns=turns, think_s=think_s
        ),
        stages=parse_stages(stages) if stages is not None else (),
        skip_unanswered=skip_unanswered,
    )


def replaced_options(
    *, users: int | None, stages: str | None, trace: Path | None
) -> dict[str, str]:
    """Return the load options that users, stages or a trace replace, each with its replacement."""
    if trace:
        own = ("--rate", "--input-tokens", "--output-tokens", "--prefix-tokens")
        return dict.fromkeys(own, "--trace")
    if users is None and stages is None:
        return {}
    return {"--rate": "--stages" if users is None else "--users"}
