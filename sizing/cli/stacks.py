"""`sizing export`, `accept`, `read` and `traffic`: plans for others, and what others run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from minicluster.errors import NegativeAnswer
from minicluster.files import make_folder, write_atomically
from minicluster.pages.write import write_page
from minicluster.shell import say, talk
from minicluster.units import seconds
from minicluster.workload.trace_options import SkipImages, TimeUnit, TraceReading
from sizing.cli.common import (
    AsJson,
    Overrides,
    PlanFile,
    out_file,
    print_json,
    show,
)
from sizing.stacks import FORMAT_NAMES

if TYPE_CHECKING:
    from minicluster.plan import Plan
    from sizing.scenario import Scenario
    from sizing.stacks.read import ReadDeployment

STDIN = Path("/dev/stdin")
"""File of standard input, which `-` stands for."""


def export(
    plan: PlanFile,
    to: Annotated[
        str | None, Option(help="Stack: " + ", ".join(FORMAT_NAMES) + "; else the plan's engine.")
    ] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="DIR", help="Folder of the files; else stdout")
    ] = None,
    image: Annotated[
        str | None, Option(help="Container image (dynamo, llm-d; optional for kserve)")
    ] = None,
) -> None:
    """Write a plan for another serving stack: commands of its engines, or its files."""
    from minicluster.plan import read_plan
    from sizing.stacks.formats import export as exported

    files = exported(read_plan(plan), to, image=image)
    if out is None:
        many = len(files) > 1
        for name, text in files.items():
            typer.echo((f"# file: {name}\n" if many else "") + text)
        return
    make_folder(out, "--out")
    for name, text in files.items():
        write_atomically(out / name, text)
        say(f"wrote {out / name}")


def read(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Script of `vllm serve` or `docker run`, manifest (Dynamo, Kubernetes, Ray),"
            " InferenceX record; - for standard input; or one command itself, in quotes.",
        ),
    ],
    scenario: Annotated[
        str | None, Option(help="Scenario that gives what the file does not: load, SLO, GPUs")
    ] = None,
    out: Annotated[Path | None, out_file("Scenario file to write")] = None,
    better: Annotated[
        bool, Option("--better", help="Predict what runs, plan anew, and print both side by side")
    ] = False,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Read what runs in another stack as a scenario and pools, to predict and to better it."""
    from sizing.stacks.read import read_deployment

    served, found = read_deployment(_file_or_text(source), overrides or [], base=scenario)
    if out is not None:
        write_atomically(out, served.to_toml())
    if better:
        _print_better(served, found, as_json=as_json)
        return
    if as_json:
        raw = {"scenario": served.set_keys(), "pools": found.pools, "notes": found.notes}
        print_json(raw)
        return
    if out is None:
        typer.echo(served.to_toml())
    for note in found.notes:
        say(note)
    say(_limits(served))
    place = out or "SCENARIO.toml"
    pools = " ".join(f"--{role} {size}" for role, size in found.pools.items())
    say(f"predict it:  sizing predict {place} {pools}")
    say(f"better it:   sizing plan {place}, or --better here for both side by side")


def _limits(served: Scenario) -> str:
    slo = served.scenario.slo
    limits = " and ".join(
        f"{name.upper()} < {seconds(limit_s)}" for name, limit_s in slo.limits_s.items()
    )
    return f"judged by [slo]: {limits} at {slo.percentile}"


def _print_better(served: Scenario, found: ReadDeployment, *, as_json: bool) -> None:
    """Predict the pools that run, plan for the same load and SLO, and print what there is."""
    from minicluster.plan import to_json
    from sizing.planner.plan import NoPlan, plan_classes
    from sizing.planner.predict import predict
    from sizing.planner.workers import Workers
    from sizing.report.today import today_table

    plans: dict[str, Plan] = {}
    no_plan: NoPlan | None = None
    with talk.status("searching layouts"), Workers.beside(None) as workers:
        today = predict(served, **found.pools)
        try:
            plans = plan_classes(served, workers=workers).chosen
        except NoPlan as error:
            no_plan = error
    data: dict[str, object] = {
        "today": asdict(today),
        "better": {of: json.loads(to_json(plan)) for of, plan in plans.items()},
        "notes": found.notes,
    }
    if no_plan is not None:
        data["infeasible"] = asdict(no_plan.infeasible)
    notes = (*found.notes, _limits(served))
    show(data, today_table(today, served, plans), *notes, as_json=as_json)
    if no_plan is not None:
        raise NegativeAnswer(str(no_plan), answered=as_json)


def _file_or_text(source: str) -> Path | str:
    """Return a command that was given itself as it is; else the file, `-` standard input's."""
    from sizing.catalog.folder import exists
    from sizing.stacks.read import is_command

    file = STDIN if source == "-" else Path(source)
    return source if is_command(source) and not exists(file) else file


def traffic(
    file: Annotated[
        Path,
        typer.Argument(
            help="Trace, access log, OTLP spans, vLLM's metrics, or conversations (ShareGPT)."
        ),
    ],
    out: Annotated[Path | None, out_file("Trace of the arrivals to write")] = None,
    characters_per_token: Annotated[
        float | None, Option(help="Characters of a token, for conversations")
    ] = None,
    time_unit: TimeUnit = None,
    skip_images: SkipImages = False,
    as_json: AsJson = False,
) -> None:
    """Describe the traffic of a log as the load of a scenario."""
    from sizing.stacks.traffic import read_traffic

    reading = TraceReading(time_unit=time_unit, skip_images=skip_images)
    found = read_traffic(file, reading, characters_per_token=characters_per_token, trace=out)
    if as_json:
        print_json(found.to_json())
        return
    typer.echo(found.to_toml())
    for line in found.lines():
        say(line)
    if out is not None:
        say(f"wrote {out}: `sizing simulate PLAN --trace {out}` and `loadtest run` replay it")


def accept(
    plan: PlanFile,
    out: Annotated[
        Path, Option("--out", "-o", metavar="DIR", help="Folder of the pack: test, rules, page")
    ],
) -> None:
    """Write a plan as a test that a buyer holds a vendor to: load, limits, alerts, page."""
    from minicluster.plan import read_plan
    from sizing.report.acceptance import acceptance, acceptance_files, acceptance_page

    test = acceptance(read_plan(plan))
    make_folder(out, "--out")
    for name, text in acceptance_files(test).items():
        write_atomically(out / name, text)
    write_page(out / "index.html", acceptance_page(test))
    say(f"{test.requests:,} requests in {seconds(test.run_s)}: sh {out}/accept.sh ENDPOINT")
    say(f"what is accepted: {out}/index.html")
