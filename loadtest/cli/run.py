"""`loadtest run`, `report`, `import` and `selftest`: commands on one run, and on the client."""

from __future__ import annotations

from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from loadtest.cli.studies import LOCAL, Host, Insecure, Json, Seed
from loadtest.verdict.tolerance import TOLERANCE, parse_tolerance
from minicluster import shell
from minicluster.errors import Exit, InputError
from minicluster.specs.checks import one_of
from minicluster.workload import PROCESSES
from minicluster.workload.sample_size import default_requests
from minicluster.workload.trace_options import SkipImages, TimeUnit, TraceReading

if TYPE_CHECKING:
    from loadtest.run.run_config import TestLoad
    from loadtest.run.schedule import ArrivalShape

DEFAULT_TOLERANCE = ",".join(f"{metric}={most}" for metric, most in TOLERANCE.items())
DEFAULT_REQUESTS = ", ".join(
    f"{percentile}: {default_requests(percentile):,}" for percentile in ("p99", "p95", "p90")
)
DEFAULT_LEVELS = "1,50,200@0.04,200"
VOCAB_SIZE = 1000
"""Default vocabulary: every model has that many plain token ids."""

APIS = ("completions", "chat")
SIMULATED = "simulated engines, {:g} times slower than the plan: all seconds are the plan's"
PLAIN = "lengths as the server gave them (--plain)"
EXAMPLE = "--rate 2 --input-tokens 512 --output-tokens 64 --slo ttft=1,tpot=0.05"

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for samples and verdict.")]
AsJson = Annotated[bool, typer.Option("--json", help="verdict.json on stdout, not the table.")]
JUnit = Annotated[Path | None, typer.Option("--junit", help="File for the verdict as JUnit XML.")]
Tolerance = Annotated[str, typer.Option(help="Tolerance of the predicted means; 0.25 is 25 %.")]
RequirePrediction = Annotated[
    bool, typer.Option("--require-prediction", help="Exit code 3 if the prediction did not hold.")
]


def run(  # noqa: PLR0913  (a command line is its options)
    *,
    plan: Annotated[Path | None, typer.Argument(help="Plan file of `sizing plan`.")] = None,
    host: Host = LOCAL,
    model: Annotated[
        str | None, typer.Option(help="Served name of the model; without a plan.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second; without a plan.")] = None,
    input_tokens: Annotated[
        str | None,
        typer.Option(
            help="Input tokens per request: 512, 256-768 or lognormal:MEDIAN:SIGMA:MAX; "
            "without a plan."
        ),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(help="Output tokens per request, in the same forms; without a plan."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="SLO in seconds: ttft=1,tpot=0.05,percentile=p99; without a plan."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help=f"Upper bound of random token ids, by default {VOCAB_SIZE}; without a plan."
        ),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Measured seconds.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help=f"Measured requests; by default by the SLO's percentile, {DEFAULT_REQUESTS}."
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Warm-up seconds; by default 3 x the expected time of a request, at least 5."
        ),
    ] = None,
    seed: Seed = 0,
    arrivals: Annotated[
        str, typer.Option(help=f"Distribution of arrival gaps: {', '.join(PROCESSES)}.")
    ] = "poisson",
    gap_cv: Annotated[
        float | None, typer.Option(help="Coefficient of variation of gamma gaps; bursts above 1.")
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="Users of a closed loop, each with one request at a time.")
    ] = None,
    turns: Annotated[
        int, typer.Option(help="Turns per conversation; each prompt contains the earlier turns.")
    ] = 1,
    think: Annotated[
        float, typer.Option(help="Seconds between an answer and the next turn or request.")
    ] = 0.0,
    stages: Annotated[
        str | None,
        typer.Option(help="Changing rates: 5x60,10-40x120 (requests/s x seconds; a-b is a ramp)."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace with arrivals and lengths: Azure, BurstGPT, Mooncake, Qwen-Bailian, log"
            " or schedule."
        ),
    ] = None,
    skip_unanswered: Annotated[
        bool,
        typer.Option("--skip-unanswered", help="Trace requests with 0 output tokens left out."),
    ] = False,
    time_unit: TimeUnit = None,
    skip_images: SkipImages = False,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(
            help="Common first tokens of all prompts, which may be cached; without a plan."
        ),
    ] = None,
    api: Annotated[
        str, typer.Option(help="Endpoint API: completions (token ids) or chat (words).")
    ] = "completions",
    processes: Annotated[int, typer.Option(help="Client processes that share the schedule.")] = 1,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Parameters of OpenAI's API only: answers end when the model ends them.",
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Time limit of a request in seconds; by default 10 x what the SLO allows."
        ),
    ] = None,
    insecure: Insecure = False,
    output: Output = Path("out/loadtest"),
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    require_prediction: RequirePrediction = False,
    junit: JUnit = None,
    json: AsJson = False,
) -> None:
    """Load an endpoint as its plan or the options say, and judge the latencies."""
    from loadtest.client.endpoint import base_address, check_models
    from loadtest.client.launch import run_with_progress_bar
    from loadtest.client.steps import keep_engine_steps
    from loadtest.client.trial import learned, try_request
    from loadtest.run.folder import held, prepare
    from loadtest.run.run_config import RunLength, check_chat, make_job
    from loadtest.run.schedule import ArrivalShape
    from loadtest.run.stages import parse_stages
    from minicluster.workload.sources import RequestSource
    from minicluster.workload.traces import read_trace

    given = {
        "--model": model,
        "--rate": rate,
        "--input-tokens": input_tokens,
        "--output-tokens": output_tokens,
        "--slo": slo,
        "--vocab-size": vocab_size,
        "--prefix-tokens": prefix_tokens,
    }
    shape = ArrivalShape(
        source=RequestSource(
            process=arrivals, gap_cv=gap_cv, users=users, turns=turns, think_s=think
        ),
        stages=() if stages is None else parse_stages(stages),
        skip_unanswered=skip_unanswered,
        reading=TraceReading(time_unit=time_unit, skip_images=skip_images),
    )
    load = _planned_load(plan, given) if plan else _free_load(given, shape, trace)
    if trace:
        load = replace(load, workload=replace(load.workload, trace=str(trace)))
        for line in read_trace(trace, shape.reading, skip_unanswered=skip_unanswered).file.lines():
            shell.say(line)
    if require_prediction and not plan:
        raise InputError("--require-prediction", "without a plan", "a plan with a prediction")
    one_of(APIS, **{"--api": api})
    tolerances, address = parse_tolerance(tolerance), base_address(host, insecure=insecure)
    length = RunLength(
        duration_s=duration,
        num_requests=requests,
        warmup_s=warmup,
        timeout_s=timeout,
        seed=seed,
    )
    job = make_job(load, length, host=address, shape=shape, workers=processes)
    served, adapters, slowdown = check_models(
        address, load.model, adapters=load.workload.lora_adapters, insecure=insecure
    )
    job = replace(job, model=served, adapters=adapters, insecure=insecure, slowdown=slowdown)
    job = replace(job, plain=plain, caveats=(PLAIN,) if plain else ())
    if slowdown is not None:
        shell.say(SIMULATED.format(slowdown))
    if api == "chat":
        job = learned(job)
    schedule = job.requests()
    check_chat(job, schedule)
    try_request(job, schedule)
    with held(output) as lock:
        prepare(output, job, schedule, plan)
        run_with_progress_bar(output, job, lock)
        keep_engine_steps(output, job)
        _judge(output, tolerances, require_prediction=require_prediction, junit=junit, json=json)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    *,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    require_prediction: RequirePrediction = False,
    junit: JUnit = None,
    json: AsJson = False,
) -> None:
    """Judge a run again from its samples, and write its report."""
    tolerances = parse_tolerance(tolerance)
    _judge(folder, tolerances, require_prediction=require_prediction, junit=junit, json=json)


def import_results(  # noqa: PLR0913  (as for run)
    results: Annotated[
        Path,
        typer.Argument(
            help="Results of GuideLLM (JSON), AIPerf (profile_export.jsonl), inference-perf"
            " (per_request_lifecycle_metrics.json) or `vllm bench serve` (--save-detailed)."
        ),
    ],
    plan: Annotated[Path, typer.Argument(help="Plan file of what was loaded.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the run.")],
    benchmark: Annotated[
        int | None, typer.Option(help="Number of the benchmark in a file of several, from 1.")
    ] = None,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
    require_prediction: RequirePrediction = False,
    junit: JUnit = None,
    json: AsJson = False,
) -> None:
    """Judge what another load generator measured, as a run for compare and `sizing calibrate`."""
    from loadtest.run.folder import held
    from loadtest.run.imported import import_run

    tolerances = parse_tolerance(tolerance)
    with held(output):
        import_run(results, plan, output, benchmark=benchmark)
        _judge(output, tolerances, require_prediction=require_prediction, junit=junit, json=json)


def selftest(
    *,
    streams: Annotated[
        str,
        typer.Option(
            help="Concurrent streams of each level; 200@0.04: 200, with 0.04 s per token."
        ),
    ] = DEFAULT_LEVELS,
    seconds: Annotated[float, typer.Option(help="Measured seconds of each level.")] = 8.0,
    capacity: Annotated[
        bool, typer.Option(help="Capacity of the client: more streams until it is saturated.")
    ] = True,
    json: Json = False,
) -> None:
    """Measure the client's own error and capacity against a mock server with known timings."""
    from loadtest.report.table import capacity_text, print_client_errors
    from loadtest.selftest.selftest import measure_capacity, measure_client, parse_streams

    levels = parse_streams(streams)
    with shell.talk.status("loading the mock server"):
        errors = [measure_client(level, seconds) for level in levels]
        tried = measure_capacity(seconds) if capacity else []
    if json:
        found = {"errors": list(map(asdict, errors)), "capacity": list(map(asdict, tried)) or None}
        typer.echo(dumps(found, indent=2))
    else:
        print_client_errors([*errors, *tried], Console())
        if tried:
            typer.echo(capacity_text(tried))
    raise typer.Exit(Exit.DONE if all(e.fit for e in errors) else Exit.INCONCLUSIVE)


def _planned_load(plan: Path, given: dict[str, Any]) -> TestLoad:
    from loadtest.run.run_config import planned_load
    from minicluster.plan import read_plan

    for option, value in given.items():
        if value is not None:
            raise InputError(option, value, "no such option with a plan, which determines the load")
    return planned_load(read_plan(plan))


def _free_load(given: dict[str, Any], shape: ArrivalShape, trace: Path | None) -> TestLoad:
    """Return the load of the options *given*; what trace, users or stages replace is 1 in it."""
    from loadtest.run.run_config import free_load, parse_lengths
    from loadtest.verdict.slo import parse_slo
    from minicluster.specs.workload import WorkloadSpec

    replaced = {}
    if trace:
        described = ("--rate", "--input-tokens", "--output-tokens", "--prefix-tokens")
        replaced = dict.fromkeys(described, "--trace")
    elif shape.closed or shape.stages:
        replaced = {"--rate": "--users" if shape.closed else "--stages"}
    for option, other in replaced.items():
        if given[option] is not None:
            raise InputError(option, given[option], f"no such option with {other}")
    values: dict[str, Any] = dict.fromkeys(replaced, 1)
    values |= {"--model": None, "--vocab-size": VOCAB_SIZE, "--prefix-tokens": 0}
    values |= {option: value for option, value in given.items() if value is not None}
    for option in given:
        if option not in values:
            raise InputError(option, None, "a plan, or a load", f"for example {EXAMPLE}")
    workload = WorkloadSpec(
        requests_per_s=float(values["--rate"]),
        input_tokens=parse_lengths(str(values["--input-tokens"]), "--input-tokens"),
        output_tokens=parse_lengths(str(values["--output-tokens"]), "--output-tokens"),
        prefix_tokens=values["--prefix-tokens"],
    )
    slo, model = parse_slo(values["--slo"]), values["--model"]
    return free_load(workload, slo, model=model, vocab_size=values["--vocab-size"])


def _judge(
    folder: Path,
    tolerances: dict[str, float],
    *,
    require_prediction: bool,
    junit: Path | None,
    json: bool,
) -> NoReturn:
    from loadtest.report.judge import judge_run
    from loadtest.report.table import print_verdict
    from loadtest.run.folder import as_json

    verdict = judge_run(folder, tolerances, require_prediction=require_prediction, junit=junit)
    if json:
        typer.echo(as_json(verdict), nl=False)
    else:
        print_verdict(verdict, Console())
        shell.say(f"report: {folder / 'report.html'}")
    raise typer.Exit(verdict.exit_code)
