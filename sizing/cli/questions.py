"""`sizing capacity`, `day`, `split-map` and `decisions`: the questions that a plan raises."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from minicluster.errors import InputError
from minicluster.specs.scaling import HOLD_S, MARGIN
from sizing.cli.common import naming, progress
from sizing.cli.study import StudyOptions, study
from sizing.planner.studies.defaults import ATTAINMENT, DECISIONS, INTERVAL_S, THINK_S

ProfileFile = Annotated[
    Path,
    Option(
        help="CSV of hour or time_s, and requests_per_s or peak_fraction; or a shipped one, such"
        " as sine-day"
    ),
]


@study
def capacity(
    asked: StudyOptions,
    gpus: Annotated[
        str | None,
        Option(
            metavar="N[,N..]",
            help="Numbers of GPUs, such as 16, 8,16,32 or 8..64 (doubling); absent: as many as"
            " max_gpus and the budgets of [cost] allow",
        ),
    ] = None,
    usd_per_hour: Annotated[
        float | None, Option(help="US dollars per hour: as many GPUs as they pay for, too")
    ] = None,
    think_seconds: Annotated[
        float | None,
        Option(
            help="Seconds between an answer and the same user's next request; absent: those of"
            f" the load's users, else {THINK_S:g}"
        ),
    ] = None,
) -> None:
    """Find the highest rate, and the users, that so many GPUs carry within the SLO."""
    from sizing.planner.studies import capacity as capacities
    from sizing.planner.workers import Workers
    from sizing.report.questions import capacity_sections

    inputs = asked.load()
    counts = [] if gpus is None else parse_gpus(gpus)
    if usd_per_hour is not None:
        counts.append(capacities.gpus_for_usd(inputs, usd_per_hour))
    with (
        naming(asked.scenario),
        progress("searching rates") as told,
        Workers.beside(asked.jobs) as workers,
    ):
        counts = counts or [capacities.gpus_within_budgets(inputs)]
        found = capacities.capacity(
            inputs, counts, think_s=think_seconds, workers=workers, progress=told
        )
    asked.answer("capacity", asdict(found), capacity_sections(found))
    asked.leave(
        found=any(each.requests_per_s for each in found.points),
        stopped=found.interrupted,
        so_far=f"{len(found.points)} of {len(set(counts))} numbers of GPUs",
    )


def parse_gpus(text: str) -> list[int]:
    """
    Read `8,16,32`, or `8..64`: 8 and its doubles up to 64, which is counted, too.

    Raises:
        InputError: no such numbers.
    """
    low, dots, high = text.partition("..")
    numbers = [low, high] if dots else text.split(",")
    if not all(each.strip().isdecimal() and int(each) for each in numbers):
        raise InputError("--gpus", text, "whole numbers above 0, for example 8,16,32 or 8..64")
    counts = [int(each) for each in numbers]
    if not dots:
        return counts
    first, last = counts
    if first > last:
        raise InputError("--gpus", text, "the smaller number first", f"{last}..{first}")
    doubles = (first << step for step in range((last // first).bit_length()))
    return list(dict.fromkeys([*doubles, last]))


@study
def day(  # noqa: PLR0913, PLR0917  (a command's options)
    asked: StudyOptions,
    profile: ProfileFile,
    cold_start_seconds: Annotated[
        float, Option(help="Seconds from the decision for a replica until it answers; measure it")
    ],
    forecast_error: Annotated[
        float, Option(help="Share by which measured rates are off, at most")
    ] = 0.0,
    margin: Annotated[
        float, Option(help="Policy: share by which the next rate may be higher")
    ] = MARGIN,
    hold_seconds: Annotated[
        float, Option(help="Policy: seconds that a replica stays when no longer needed")
    ] = HOLD_S,
    interval_seconds: Annotated[
        float, Option(help="Policy: seconds between two decisions")
    ] = INTERVAL_S,
    attainment: Annotated[
        float, Option(help="Share of the requests that are to find the SLO held")
    ] = ATTAINMENT,
    seed: Annotated[int, Option(help="Seed of the forecast errors")] = 0,
) -> None:
    """Compare static pools with autoscaling over a day: GPU-hours, attainment, static share."""
    from minicluster.workload.day_profile import read_profile
    from sizing import catalog
    from sizing.planner.plan import at_planned_rate
    from sizing.planner.studies import day as days
    from sizing.planner.workers import Workers
    from sizing.report.questions import day_sections

    options = days.DayOptions(
        cold_start_s=cold_start_seconds,
        forecast_error_fraction=forecast_error,
        margin=margin,
        hold_s=hold_seconds,
        interval_s=interval_seconds,
        attainment=attainment,
        seed=seed,
    )
    scenario, file = asked.load(), catalog.find_profile(str(profile))
    with naming(asked.scenario), progress("simulating the day") as told:
        inputs = at_planned_rate(scenario)
        curve = read_profile(file, inputs.scenario.workload.requests_per_s)
        with Workers.instead(asked.jobs) as workers:
            found = days.day(inputs, curve, options, workers=workers, progress=told)
    asked.answer("day", asdict(found), day_sections(found))


@study
def split_map(
    asked: StudyOptions,
    x: Annotated[
        str | None,
        Option(
            metavar="KEY=V,V",
            help="Scenario key and values, prompt_answer_ratio=V,V or link_bytes_per_s=V,V;"
            " absent: the ratio",
        ),
    ] = None,
    y: Annotated[
        str | None, Option(metavar="KEY=V,V", help="Likewise; absent: link_bytes_per_s")
    ] = None,
) -> None:
    """Map where split pools need less than aggregated ones, and how sure that is."""
    from sizing.planner.studies import split_map as maps
    from sizing.planner.studies.grid import parse_key
    from sizing.planner.workers import Workers
    from sizing.report.questions import split_map_sections

    inputs = asked.load()
    first, second = (
        None if text is None else parse_key(text, f"--{name}")
        for name, text in (("x", x), ("y", y))
    )
    with (
        naming(asked.scenario),
        progress("sizing both kinds of pools") as told,
        Workers.instead(asked.jobs) as workers,
    ):
        found = maps.split_map(inputs, first, second, workers=workers, progress=told)
    points = [asdict(each) | {"saved_fraction": each.saved_fraction} for each in found.points]
    data: dict[str, Any] = asdict(found) | {"points": points}
    asked.answer("split-map", data, split_map_sections(found))
    asked.leave(
        found=any(each.split_gpus or each.mixed_gpus for each in found.points),
        stopped=found.interrupted,
        so_far="the points so far",
    )


@study
def decisions(
    asked: StudyOptions,
    only: Annotated[
        str,
        Option(help="Names in place of all, by commas: " + ", ".join(DECISIONS)),
    ] = "",
) -> None:
    """Plan anew with one decision or forecast changed at a time: what each costs in GPUs."""
    from sizing.planner.studies import decisions as changed_plans
    from sizing.planner.studies.result import result_json
    from sizing.planner.workers import Workers
    from sizing.report.questions import decisions_sections

    inputs = asked.load()
    with naming(asked.scenario), progress("planning") as told:
        names = [each.strip() for each in only.split(",") if each.strip()]
        with Workers.instead(asked.jobs) as workers:
            found = changed_plans.decisions(inputs, only=names, workers=workers, progress=told)
    rows = [
        {"name": each.name, "value": each.value, "against_gpus": each.against_gpus}
        | {"gpus": each.gpus, **result_json(each.result)}
        for each in found.rows
    ]
    data = {
        "base": result_json(found.base),
        "decisions": rows,
        "interrupted": found.interrupted,
    }
    asked.answer("decisions", data, decisions_sections(found))
    asked.leave(
        found=any(each.plans for each in (found.base, *(row.result for row in found.rows))),
        stopped=found.interrupted,
        so_far="the changes so far",
    )
