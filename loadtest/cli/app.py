"""The `loadtest` command."""

from __future__ import annotations

from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from loadtest.cli.options import (
    Api,
    GapCv,
    Gaps,
    Insecure,
    PrefixTokens,
    Processes,
    SkipUnanswered,
    Stages,
    Think,
    Timeout,
    Trace,
    Turns,
    Users,
    shape_of,
    told_elsewhere,
)
from loadtest.cli.studies import compare, search
from loadtest.client.chat import learn_chat
from loadtest.client.endpoint import base_address, check_model, check_trust
from loadtest.client.progress import watch
from loadtest.report.judge import JudgeOptions, publish
from loadtest.report.table import capacity_text, print_client_errors, print_verdict
from loadtest.run.folder import prepare
from loadtest.run.run_config import (
    RunLength,
    TestLoad,
    check_order,
    check_prompts,
    default_requests,
    free_load,
    make_job,
    parse_lengths,
    planned_load,
    traced,
)
from loadtest.selftest.selftest import (
    DEFAULT_LEVELS,
    measure_capacity,
    measure_client,
    parse_streams,
)
from loadtest.verdict.prediction import TOLERANCE, parse_tolerance
from loadtest.verdict.slo import parse_slo
from loadtest.verdict.verdict import to_json
from minicluster import shell
from minicluster.errors import Exit, InputError
from minicluster.plan import read_plan
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import WorkloadSpec
from minicluster.workload.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Mapping


ABOUT = "Load an LLM endpoint, and judge its latencies by what was promised and predicted."
app = typer.Typer(
    help=ABOUT,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEFAULT_TOLERANCE = ",".join(f"{metric}={most}" for metric, most in TOLERANCE.items())
DEFAULT_REQUESTS = ", ".join(
    f"{percentile}: {default_requests(SloSpec(percentile=percentile)):,}"
    for percentile in ("p99", "p95", "p90")
)
VOCAB_SIZE = 1000
APIS = ("completions", "chat")
TRIES_EXAMPLE = "--rate 2 --input-tokens 512 --output-tokens 64 --slo ttft=1,tpot=0.05"

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for samples and verdict.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print verdict.json instead of the table.")]
JUnit = Annotated[Path | None, typer.Option("--junit", help="Write the verdict as JUnit XML.")]
Tolerance = Annotated[
    str, typer.Option(help="Error of the predicted means that is allowed; 0.25 is 25 %.")
]
RequirePrediction = Annotated[
    bool, typer.Option("--require-prediction", help="Exit 3 if the prediction did not hold.")
]


@app.command()
def run(  # noqa: PLR0913  (a command line is its options)
    *,
    plan: Annotated[Path | None, typer.Argument(help="From `sizing plan`.")] = None,
    host: Annotated[
        str, typer.Option(help="Endpoint; the key it wants lies in MINICLUSTER_API_KEY.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model's served name; without a plan.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests/s; without a plan.")] = None,
    input_tokens: Annotated[
        str | None,
        typer.Option(
            help="Of a prompt: 512, 256-768 or lognormal:MEDIAN:SIGMA:LONGEST; without a plan."
        ),
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="Of an answer, in the same forms; without a plan.")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="Promised, in seconds: ttft=1,tpot=0.05,percentile=p99; without a plan."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help=f"Prompts are random token ids below it; without a plan {VOCAB_SIZE}."),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to measure.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help=f"Requests to measure; if not said, by the SLO's percentile, {DEFAULT_REQUESTS}."
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Seconds before measuring; if not said, 3 x a request's expected time, at least 5."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random arrivals and lengths.")] = 0,
    arrivals: Gaps = "poisson",
    gap_cv: GapCv = None,
    users: Users = None,
    turns: Turns = 1,
    think: Think = 0.0,
    stages: Stages = None,
    trace: Trace = None,
    skip_unanswered: SkipUnanswered = False,
    prefix_tokens: PrefixTokens = None,
    api: Api = "completions",
    processes: Processes = 1,
    timeout: Timeout = None,
    insecure: Insecure = False,
    output: Output = Path("out/loadtest"),
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    require_prediction: RequirePrediction = False,
    junit: JUnit = None,
    json: AsJson = False,
) -> None:
    """Load an endpoint as its plan says, or as the options say, and judge the latencies."""
    free = {
        "--model": model,
        "--rate": rate,
        "--input-tokens": input_tokens,
        "--output-tokens": output_tokens,
        "--slo": slo,
        "--vocab-size": vocab_size,
        "--prefix-tokens": prefix_tokens,
    }
    shape = shape_of(
        (arrivals, gap_cv),
        users=users,
        turns=turns,
        think_s=think,
        stages=stages,
        skip_unanswered=skip_unanswered,
    )
    told = told_elsewhere(users=users, stages=stages, trace=trace)
    load = _planned(plan, free) if plan else _free(free, told)
    if trace:
        load = _traced(load, trace, skip_unanswered=skip_unanswered)
    if require_prediction and not plan:
        raise InputError("--require-prediction", None, "a plan, which holds the prediction")
    if api not in APIS:
        raise InputError("--api", api, f"one of {', '.join(APIS)}")
    allowed = parse_tolerance(tolerance)
    extent = RunLength(
        duration_s=duration,
        num_requests=requests,
        warmup_s=warmup,
        timeout_s=timeout,
        seed=seed,
    )
    address = base_address(host)
    check_order(load, extent, shape)
    check_trust(address, insecure=insecure)
    served = check_model(address, load.model, insecure=insecure)
    if api == "chat":
        load = replace(load, chat=learn_chat(address, served, insecure=insecure))
    job = make_job(load, extent, host=address, model=served, shape=shape, workers=processes)
    job = replace(job, insecure=insecure)
    due = job.requests()
    check_prompts(job, due)
    prepare(output, job, due, plan)
    watch(output, job)
    terms = JudgeOptions(tolerance=allowed, require_prediction=require_prediction, junit=junit)
    _publish(output, terms, json=json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    *,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    require_prediction: RequirePrediction = False,
    junit: JUnit = None,
    json: AsJson = False,
) -> None:
    """Judge a run again from its raw samples, and draw its report."""
    terms = JudgeOptions(
        tolerance=parse_tolerance(tolerance), require_prediction=require_prediction, junit=junit
    )
    _publish(folder, terms, json=json)


@app.command()
def selftest(
    *,
    streams: Annotated[
        str,
        typer.Option(help="Concurrent streams to try; 200@0.04: 200 of them with 0.04 s a token."),
    ] = DEFAULT_LEVELS,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each.")] = 8.0,
    capacity: Annotated[
        bool, typer.Option(help="Then raise the streams until the client is saturated.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Load a bundled server with known timings and print the client's own error and capacity."""
    levels = parse_streams(streams)
    with shell.talk.status("loading the bundled server"):
        errors = [measure_client(level, seconds) for level in levels]
        most = measure_capacity(seconds) if capacity else None
    if json:
        tried = [asdict(error) for error in most.tried] if most else None
        typer.echo(dumps({"errors": [asdict(e) for e in errors], "capacity": tried}, indent=2))
    else:
        print_client_errors([*errors, *(most.tried if most else ())], Console())
        if most:
            typer.echo(capacity_text(most))
    raise typer.Exit(Exit.DONE if all(e.fit for e in errors) else Exit.INCONCLUSIVE)


def _planned(plan: Path, free: Mapping[str, object]) -> TestLoad:
    given = [option for option, value in free.items() if value is not None]
    if given:
        raise InputError(given[0], free[given[0]], "left out: the plan says it")
    return planned_load(read_plan(plan))


def _traced(load: TestLoad, path: Path, *, skip_unanswered: bool) -> TestLoad:
    """Take arrivals and lengths from a trace, and say what of it is left out."""
    trace = read_trace(path, skip_unanswered=skip_unanswered)
    if trace.skipped:
        left_out = f"left out {trace.skipped:,} requests without an answer"
        shell.talk.print(left_out, highlight=False)
    return traced(load, path, trace)


def _free(given: Mapping[str, object], told: Mapping[str, str]) -> TestLoad:
    """Return the load of the options; a 1 stands in for what another one says, by *told*."""
    for option, other in told.items():
        if given[option] is not None:
            raise InputError(option, given[option], f"left out: {other} says it")
    said: dict[str, object] = {
        **dict.fromkeys(told, 1),
        "--vocab-size": VOCAB_SIZE,
        "--prefix-tokens": 0,
        **{option: value for option, value in given.items() if value is not None},
    }
    for option in given:
        if option not in said and option != "--model":
            raise InputError(option, None, "a plan, or a load", f"for example {TRIES_EXAMPLE}")
    workload = WorkloadSpec(
        requests_per_s=float(str(said["--rate"])),
        input_tokens=parse_lengths(str(said["--input-tokens"]), "--input-tokens"),
        output_tokens=parse_lengths(str(said["--output-tokens"]), "--output-tokens"),
        prefix_tokens=int(str(said["--prefix-tokens"])),
    )
    model = given["--model"]
    return free_load(
        workload,
        parse_slo(str(said["--slo"])),
        model=None if model is None else str(model),
        vocab_size=int(str(said["--vocab-size"])),
    )


def _publish(folder: Path, terms: JudgeOptions, *, json: bool) -> NoReturn:
    """Judge the run, write verdict and report, print it, leave with its exit code."""
    verdict = publish(folder, terms)
    if json:
        typer.echo(to_json(verdict), nl=False)
    else:
        print_verdict(verdict, Console())
        shell.talk.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    raise typer.Exit(verdict.exit_code)


app.command()(search)
app.command()(compare)


def main() -> NoReturn:
    """Run `loadtest`."""
    shell.run(app, "loadtest")
