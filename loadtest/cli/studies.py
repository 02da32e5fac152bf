"""`loadtest search` and `loadtest compare`: commands on more than one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from minicluster import shell
from minicluster.errors import Exit, InputError
from minicluster.files import make_folder
from minicluster.pages.write import write_page
from minicluster.specs.slo import METRICS
from minicluster.workload.sample_size import enough_requests

if TYPE_CHECKING:
    from loadtest.studies.capacity_search import CapacitySearch
    from loadtest.verdict.verdict import Verdict


TOLERANCE = {"ttft": 0.20, "tpot": 0.15}
"""
Default tolerance of the predicted means at the pace of the engines, as fractions of the measured
ones; of the plan's own prediction where the engines' pace is not known.
"""


def parse_tolerance(text: str) -> dict[str, float]:
    """
    Parse `ttft=0.2,tpot=0.15`, or one number for both.

    Raises InputError: another form, or a fraction that is not positive.
    """
    expectation = "fractions like ttft=0.2,tpot=0.15, or one for both"
    try:
        if "=" not in text:
            tolerance = dict.fromkeys(TOLERANCE, float(text))
        else:
            pairs = (part.split("=") for part in text.split(","))
            tolerance = {key.strip(): float(value) for key, value in pairs}
    except ValueError:
        raise InputError("--tolerance", text, expectation) from None
    if not set(tolerance) <= set(METRICS) or not all(
        0 < value < float("inf") for value in tolerance.values()
    ):
        raise InputError("--tolerance", text, expectation)
    return tolerance


Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Certificate of the endpoint not checked, and no API key sent."
    ),
]
Host = Annotated[str, typer.Option(help="Endpoint address; MINICLUSTER_API_KEY holds its API key.")]
LOCAL = "http://127.0.0.1:8000"
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the table.")]
Seed = Annotated[int, typer.Option(help="Random seed of arrivals and lengths.")]
MOST_REQUESTS = ", ".join(
    f"{percentile}: {enough_requests(percentile):,}" for percentile in ("p99", "p95", "p90")
)


def search(  # noqa: PLR0913  (a command line is its options)
    plan: Annotated[Path, typer.Argument(help="Plan file of `sizing plan`, deployed at --host.")],
    *,
    host: Host = LOCAL,
    first: Annotated[
        float | None,
        typer.Option(help="First request rate; by default 0.8 of the predicted limit."),
    ] = None,
    resolution: Annotated[
        float,
        typer.Option(help="Width of the final bracket of rates; 0.1 is 10 %."),
    ] = 0.1,
    most_requests: Annotated[
        int | None,
        typer.Option(help=f"Largest number of requests of a run; by default {MOST_REQUESTS}."),
    ] = None,
    warmup: Annotated[float | None, typer.Option(help="Warm-up seconds of each run.")] = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float, typer.Option(help="Tolerance of the predicted limit; 0.15 is 15 %.")
    ] = 0.15,
    require_prediction: Annotated[
        bool, typer.Option("--require-prediction", help="Exit code 3 beyond --tolerance.")
    ] = False,
    insecure: Insecure = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder; a search in it is resumed.")
    ] = Path("out/search"),
    json: Annotated[
        bool, typer.Option("--json", help="search.json on stdout, not the table.")
    ] = False,
) -> None:
    """Find the highest request rate that meets the SLO, and compare it with the plan's."""
    from loadtest.client.endpoint import base_address, check_models
    from loadtest.client.launch import run_with_progress_bar
    from loadtest.report.compare_page import search_lines, search_page, search_table
    from loadtest.report.judge import judge_run
    from loadtest.run.folder import as_json, held, prepare
    from loadtest.run.run_config import RunLength, make_job, planned_load
    from loadtest.studies.capacity_search import new_search, resume_search, run_search
    from minicluster.plan import read_plan

    deployed, address = read_plan(plan), base_address(host, insecure=insecure)
    if tolerance <= 0:
        raise InputError("--tolerance", tolerance, "more than 0")
    load = planned_load(deployed)
    enough = round(enough_requests(deployed.slo.percentile) / deployed.workload.rarest_fraction)
    new = new_search(
        deployed,
        address,
        first=first,
        resolution_fraction=resolution,
        most_requests=enough if most_requests is None else most_requests,
    )
    make_folder(output, "--output")
    state = resume_search(new, output)
    if state.probes:
        shell.say(f"resumed after {len(state.probes)} runs")
    _, adapters, slowdown = check_models(
        address, load.model, adapters=load.workload.lora_adapters, insecure=insecure
    )

    def measure(rate: float, num: int, name: str) -> Verdict:
        shell.say(f"{name}: {rate:.2f} requests/s, {num} requests")
        at_rate = replace(load, workload=load.workload.at_rate(rate))
        length = RunLength(num_requests=num, warmup_s=warmup, seed=seed)
        job = make_job(at_rate, length, host=address)
        job = replace(job, adapters=adapters, insecure=insecure, slowdown=slowdown)
        with held(output / name) as lock:
            prepare(output / name, job, job.requests(), plan)
            run_with_progress_bar(output / name, job, lock)
        verdict = judge_run(output / name, TOLERANCE)
        shell.say(f"  {verdict.verdict} {'; '.join(verdict.reasons)}")
        return verdict

    done = run_search(state, measure, output)
    write_page(output / "search.html", search_page(done))
    if json:
        typer.echo(as_json(done), nl=False)
    else:
        console = Console()
        console.print(search_table(done))
        for line in search_lines(done):
            console.print(line, highlight=False, soft_wrap=True)
        shell.say(f"report: {output / 'search.html'}")
    raise typer.Exit(_exit(done, tolerance if require_prediction else None))


def _exit(done: CapacitySearch, tolerance: float | None) -> Exit:
    """Return 3 if no rate holds, or the required prediction is too far off; 4 if undecided."""
    found, error = done.found, done.error_fraction
    if found.low is None and found.high is not None and not found.unclear:
        return Exit.NEGATIVE
    if error is None or not found.within(done.resolution_fraction):
        return Exit.INCONCLUSIVE
    return Exit.NEGATIVE if tolerance is not None and abs(error) > tolerance else Exit.DONE


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(help="Folder of another run.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the HTML page.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two runs, and mark the differences that are statistically significant."""
    from loadtest.report.compare_page import comparison_lines, comparison_page, comparison_table
    from loadtest.run.folder import as_json, read_run
    from loadtest.studies.compare import compare_runs
    from loadtest.verdict.verdict import conclude

    one, other = (conclude(read_run(f), {}, require_prediction=False) for f in (first, second))
    comparison = compare_runs(one, other, (str(first), str(second)))
    if output:
        write_page(output, comparison_page(comparison, one, other))
    if json:
        typer.echo(as_json(comparison), nl=False)
        return
    console = Console()
    console.print(comparison_table(comparison))
    for line in comparison_lines(comparison):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
