"""`loadtest run`, `report`, `import` and `selftest`: commands on one run, and on the client."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from loadtest.cli.studies import LOCAL, TOLERANCE, Host, Insecure, Json, Seed, parse_tolerance
from minicluster import shell
from minicluster.errors import Exit, InputError
from minicluster.lazy_commands import with_options
from minicluster.specs.checks import one_of
from minicluster.workload import PROCESSES
from minicluster.workload.sample_size import default_requests
from minicluster.workload.trace_options import SkipImages, TimeUnit, TraceReading

if TYPE_CHECKING:
    from loadtest.run.run_config import RunLength, TestLoad
    from loadtest.run.schedule import ArrivalShape

DEFAULT_TOLERANCE = ",".join(f"{metric}={most}" for metric, most in TOLERANCE.items())
DEFAULT_REQUESTS = ", ".join(
    f"{percentile}: {default_requests(percentile):,}" for percentile in ("p99", "p95", "p90")
)
DEFAULT_LEVELS = "1,50,200@0.04,200"
VOCAB_SIZE = 1000  # default vocabulary: every model has that many plain token ids

APIS = ("completions", "chat")
SIMULATED = "simulated engines, {:g} times slower than the plan: all seconds are the plan's"
PLAIN = "lengths as the server gave them (--plain)"
EXAMPLE = "--rate 2 --input-tokens 512 --output-tokens 64 --slo ttft=1,tpot=0.05"

OF_A_LOAD = (
    *("model", "rate", "input_tokens", "output_tokens", "slo", "vocab_size", "prefix_tokens"),
)
"""Options that say a load; a plan says them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """How a run is judged: options of every command that writes a verdict."""

    tolerance: Annotated[
        str, typer.Option(help="Tolerance of the predicted means; 0.25 is 25 %.")
    ] = DEFAULT_TOLERANCE
    require_prediction: Annotated[
        bool,
        typer.Option("--require-prediction", help="Exit code 3 if the prediction did not hold."),
    ] = False
    junit: Annotated[
        Path | None, typer.Option("--junit", help="File for the verdict as JUnit XML.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="verdict.json on stdout, not the table.")] = (
        False
    )

    def judge(self, folder: Path) -> NoReturn:
        """Judge the run in *folder*, print its verdict, and exit with its code."""
        from loadtest.report.judge import judge_run
        from loadtest.report.table import print_verdict
        from loadtest.run.folder import as_json

        verdict = judge_run(
            folder,
            parse_tolerance(self.tolerance),
            require_prediction=self.require_prediction,
            junit=self.junit,
        )
        if self.json:
            typer.echo(as_json(verdict), nl=False)
        else:
            print_verdict(verdict, Console())
            shell.say(f"report: {folder / 'report.html'}")
        raise typer.Exit(verdict.exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(JudgeOptions):
    """The options of `loadtest run`."""

    plan: Annotated[Path | None, typer.Argument(help="Plan file of `sizing plan`.")] = None
    host: Host = LOCAL
    model: Annotated[str | None, typer.Option(help="Served name of the model; without a plan.")] = (
        None
    )
    rate: Annotated[float | None, typer.Option(help="Requests per second; without a plan.")] = None
    input_tokens: Annotated[
        str | None,
        typer.Option(
            help="Input tokens per request: 512, 256-768 or lognormal:MEDIAN:SIGMA:MAX; "
            "without a plan."
        ),
    ] = None
    output_tokens: Annotated[
        str | None,
        typer.Option(help="Output tokens per request, in the same forms; without a plan."),
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(help="SLO in seconds: ttft=1,tpot=0.05,percentile=p99; without a plan."),
    ] = None
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help=f"Upper bound of random token ids, by default {VOCAB_SIZE}; without a plan."
        ),
    ] = None
    duration: Annotated[float | None, typer.Option(help="Measured seconds.")] = None
    requests: Annotated[
        int | None,
        typer.Option(
            help=f"Measured requests; by default by the SLO's percentile, {DEFAULT_REQUESTS}."
        ),
    ] = None
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Warm-up seconds; by default 3 x the expected time of a request, at least 5."
        ),
    ] = None
    seed: Seed = 0
    arrivals: Annotated[
        str, typer.Option(help=f"Distribution of arrival gaps: {', '.join(PROCESSES)}.")
    ] = "poisson"
    gap_cv: Annotated[
        float | None, typer.Option(help="Coefficient of variation of gamma gaps; bursts above 1.")
    ] = None
    users: Annotated[
        int | None, typer.Option(help="Users of a closed loop, each with one request at a time.")
    ] = None
    turns: Annotated[
        int, typer.Option(help="Turns per conversation; each prompt contains the earlier turns.")
    ] = 1
    think: Annotated[
        float, typer.Option(help="Seconds between an answer and the next turn or request.")
    ] = 0.0
    stages: Annotated[
        str | None,
        typer.Option(help="Changing rates: 5x60,10-40x120 (requests/s x seconds; a-b is a ramp)."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace with arrivals and lengths: Azure, BurstGPT, Mooncake, Qwen-Bailian, log"
            " or schedule."
        ),
    ] = None
    skip_unanswered: Annotated[
        bool,
        typer.Option("--skip-unanswered", help="Trace requests with 0 output tokens left out."),
    ] = False
    time_unit: TimeUnit = None
    skip_images: SkipImages = False
    prefix_tokens: Annotated[
        int | None,
        typer.Option(
            help="Common first tokens of all prompts, which may be cached; without a plan."
        ),
    ] = None
    api: Annotated[
        str, typer.Option(help="Endpoint API: completions (token ids) or chat (words).")
    ] = "completions"
    processes: Annotated[int, typer.Option(help="Client processes that share the schedule.")] = 1
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Parameters of OpenAI's API only: answers end when the model ends them.",
        ),
    ] = False
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Time limit of a request in seconds; by default 10 x what the SLO allows."
        ),
    ] = None
    insecure: Insecure = False
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for samples and verdict.")
    ] = Path("out/loadtest")

    @property
    def shape(self) -> ArrivalShape:
        """How requests arrive."""
        from loadtest.run.schedule import ArrivalShape, parse_stages
        from minicluster.workload.sources import RequestSource

        return ArrivalShape(
            source=RequestSource(
                process=self.arrivals,
                gap_cv=self.gap_cv,
                users=self.users,
                turns=self.turns,
                think_s=self.think,
            ),
            stages=() if self.stages is None else parse_stages(self.stages),
            skip_unanswered=self.skip_unanswered,
            reading=TraceReading(time_unit=self.time_unit, skip_images=self.skip_images),
        )

    @property
    def length(self) -> RunLength:
        """How long the run is."""
        from loadtest.run.run_config import RunLength

        return RunLength(
            duration_s=self.duration,
            num_requests=self.requests,
            warmup_s=self.warmup,
            timeout_s=self.timeout,
            seed=self.seed,
        )

    def load(self, shape: ArrivalShape) -> TestLoad:
        """Return the plan's load, or that of the options; a trace goes over its lengths."""
        from loadtest.run.run_config import planned_load
        from minicluster.plan import read_plan
        from minicluster.workload.traces import read_trace

        if self.plan is None:
            load = self._free_load(shape)
        else:
            self._refuse(OF_A_LOAD, "a plan, which determines the load")
            load = planned_load(read_plan(self.plan))
        if self.trace is None:
            return load
        read = read_trace(self.trace, shape.reading, skip_unanswered=shape.skip_unanswered)
        for line in read.file.lines():
            shell.say(line)
        return replace(load, workload=replace(load.workload, trace=str(self.trace)))

    def _free_load(self, shape: ArrivalShape) -> TestLoad:
        """Return the load of the options; what trace, users or stages replace is 1 in it."""
        from loadtest.run.run_config import free_load, parse_lengths
        from loadtest.verdict.slo import parse_slo
        from minicluster.specs.workload import WorkloadSpec

        replaced: tuple[str, ...] = ()
        if self.trace:
            replaced = ("rate", "input_tokens", "output_tokens", "prefix_tokens")
            self._refuse(replaced, "--trace")
        elif shape.closed or shape.stages:
            replaced = ("rate",)
            self._refuse(replaced, "--users" if shape.closed else "--stages")
        values: dict[str, Any] = dict.fromkeys(replaced, 1)
        values |= {"model": None, "vocab_size": VOCAB_SIZE, "prefix_tokens": 0}
        values |= {name: v for name in OF_A_LOAD if (v := getattr(self, name)) is not None}
        for name in OF_A_LOAD:
            if name not in values:
                raise InputError(_option(name), None, "a plan, or a load", f"for example {EXAMPLE}")
        prompts, answers = (
            parse_lengths(str(values[name]), _option(name))
            for name in ("input_tokens", "output_tokens")
        )
        workload = WorkloadSpec(
            requests_per_s=float(values["rate"]),
            input_tokens=prompts,
            output_tokens=answers,
            prefix_tokens=values["prefix_tokens"],
        )
        slo = parse_slo(values["slo"])
        return free_load(workload, slo, model=values["model"], vocab_size=values["vocab_size"])

    def _refuse(self, names: tuple[str, ...], beside: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise InputError(_option(name), value, f"no such option with {beside}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@with_options
def run(options: RunOptions) -> None:
    """Load an endpoint as its plan or the options say, and judge the latencies."""
    from loadtest.client.endpoint import base_address, check_models
    from loadtest.client.launch import keep_engine_steps, run_with_progress_bar
    from loadtest.client.trial import learned, try_request
    from loadtest.run.folder import held, prepare
    from loadtest.run.run_config import check_chat, make_job

    shape, insecure, plain = options.shape, options.insecure, options.plain
    load = options.load(shape)
    if options.require_prediction and not options.plan:
        raise InputError("--require-prediction", "without a plan", "a plan with a prediction")
    one_of(APIS, **{"--api": options.api})
    parse_tolerance(options.tolerance)
    address = base_address(options.host, insecure=insecure)
    job = make_job(load, options.length, host=address, shape=shape, workers=options.processes)
    served, adapters, slowdown = check_models(
        address, load.model, adapters=load.workload.lora_adapters, insecure=insecure
    )
    job = replace(job, model=served, adapters=adapters, insecure=insecure, slowdown=slowdown)
    job = replace(job, plain=plain, caveats=(PLAIN,) if plain else ())
    if slowdown is not None:
        shell.say(SIMULATED.format(slowdown))
    if options.api == "chat":
        job = learned(job)
    schedule = job.requests()
    check_chat(job, schedule)
    try_request(job, schedule)
    with held(options.output) as lock:
        prepare(options.output, job, schedule, options.plan)
        run_with_progress_bar(options.output, job, lock)
        keep_engine_steps(options.output, job)
        options.judge(options.output)


@with_options
def report(
    options: JudgeOptions, folder: Annotated[Path, typer.Argument(help="Folder of a run.")]
) -> None:
    """Judge a run again from its samples, and write its report."""
    options.judge(folder)


@with_options
def import_results(
    options: JudgeOptions,
    results: Annotated[
        Path,
        typer.Argument(
            help="Results of GuideLLM (JSON), AIPerf (profile_export.jsonl), inference-perf"
            " (per_request_lifecycle_metrics.json) or `vllm bench serve` (--save-detailed)."
        ),
    ],
    plan: Annotated[Path, typer.Argument(help="Plan file of what was loaded.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the run.")],
    benchmark: Annotated[
        int | None, typer.Option(help="Number of the benchmark in a file of several, from 1.")
    ] = None,
) -> None:
    """Judge what another load generator measured, as a run for compare and `sizing calibrate`."""
    from loadtest.run.folder import held
    from loadtest.run.imported import import_run

    parse_tolerance(options.tolerance)
    with held(output):
        import_run(results, plan, output, benchmark=benchmark)
        options.judge(output)


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
        document = {
            "errors": list(map(asdict, errors)),
            "capacity": list(map(asdict, tried)) or None,
        }
        typer.echo(dumps(document, indent=2))
    else:
        print_client_errors([*errors, *tried], Console())
        if tried:
            typer.echo(capacity_text(tried))
    raise typer.Exit(Exit.DONE if all(e.fit for e in errors) else Exit.INCONCLUSIVE)
