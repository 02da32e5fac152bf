"""`loadtest search` and `loadtest compare`: what more than one run tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from loadtest.cli.options import Insecure  # noqa: TC001  (typer reads it)
from loadtest.client.endpoint import base_address, check_model, check_trust
from loadtest.client.progress import watch
from loadtest.report.compare_page import (
    search_lines,
    search_page,
    search_table,
    versus_lines,
    versus_page,
    versus_table,
)
from loadtest.report.judge import JudgeOptions, publish
from loadtest.run.folder import prepare, read_run
from loadtest.run.run_config import RunLength, make_job, planned_load
from loadtest.studies import capacity_search as searching
from loadtest.studies import compare as comparing
from loadtest.verdict.prediction import TOLERANCE
from minicluster import shell
from minicluster.errors import Exit, InputError
from minicluster.files import write_atomically
from minicluster.plan import read_plan

if TYPE_CHECKING:
    from loadtest.studies.capacity_search import CapacitySearch
    from loadtest.verdict.verdict import Verdict

MOST_REQUESTS = ", ".join(
    f"{percentile}: {searching.enough_requests(percentile):,}"
    for percentile in ("p99", "p95", "p90")
)


def search(  # noqa: PLR0913  (a command line is its options)
    plan: Annotated[Path, typer.Argument(help="From `sizing plan`; it is deployed at --host.")],
    *,
    host: Annotated[
        str, typer.Option(help="Endpoint; the key it wants lies in MINICLUSTER_API_KEY.")
    ] = "http://127.0.0.1:8000",
    first: Annotated[
        float | None,
        typer.Option(help="Requests/s tried first; if not said, 0.8 of the predicted limit."),
    ] = None,
    resolution: Annotated[
        float,
        typer.Option(help="How close a rate that holds and one that misses come; 0.1 is 10 %."),
    ] = 0.1,
    most_requests: Annotated[
        int | None, typer.Option(help=f"Requests of one try at most; if not said, {MOST_REQUESTS}.")
    ] = None,
    warmup: Annotated[float | None, typer.Option(help="Seconds before each try counts.")] = None,
    seed: Annotated[int, typer.Option(help="Of random arrivals and lengths.")] = 0,
    tolerance: Annotated[
        float, typer.Option(help="Error of the predicted limit that is allowed; 0.15 is 15 %.")
    ] = 0.15,
    require_prediction: Annotated[
        bool, typer.Option("--require-prediction", help="Exit 3 if it is beyond --tolerance.")
    ] = False,
    insecure: Insecure = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder; a search that is there goes on.")
    ] = Path("out/search"),
    json: Annotated[
        bool, typer.Option("--json", help="Print search.json instead of the table.")
    ] = False,
) -> None:
    """Find the highest load that holds the SLO, and compare it with the plan's."""
    deployed, address = read_plan(plan), base_address(host)
    check_trust(address, insecure=insecure)
    if tolerance <= 0:
        raise InputError("--tolerance", tolerance, "more than 0")
    load = planned_load(deployed)
    enough = searching.enough_requests(deployed.slo.percentile)
    fresh = searching.begin(
        deployed,
        address,
        first=first,
        resolution_fraction=resolution,
        most_requests=enough if most_requests is None else most_requests,
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--output", str(output), f"a folder: {error.strerror}") from None
    state = searching.resumed(fresh, output)
    if state.probes:
        shell.talk.print(f"resumed after {len(state.probes)} tries", highlight=False)
    model = check_model(address, load.model, insecure=insecure)

    def measure(rate: float, num: int, name: str) -> Verdict:
        shell.talk.print(f"{name}: {rate:.2f} requests/s, {num} requests", highlight=False)
        at_rate = replace(load, workload=replace(load.workload, requests_per_s=rate))
        extent = RunLength(num_requests=num, warmup_s=warmup, seed=seed)
        job = make_job(at_rate, extent, host=address, model=model)
        job = replace(job, insecure=insecure)
        prepare(output / name, job, job.requests(), plan)
        watch(output / name, job)
        verdict = publish(output / name, JudgeOptions(tolerance=TOLERANCE, foresee=False))
        shell.talk.print(f"  {verdict.verdict} {'; '.join(verdict.reasons)}", highlight=False)
        return verdict

    done = searching.go_on(state, measure, output)
    write_atomically(output / "search.html", search_page(done))
    if json:
        typer.echo(searching.to_json(done), nl=False)
    else:
        console = Console()
        console.print(search_table(done))
        for line in search_lines(done):
            console.print(line, highlight=False, soft_wrap=True)
        shell.talk.print(f"report: {output / 'search.html'}", highlight=False, soft_wrap=True)
    raise typer.Exit(_exit(done, tolerance if require_prediction else None))


def _exit(done: CapacitySearch, tolerance: float | None) -> Exit:
    """Return 3 if nothing tried holds, or the plan is too far off where that matters; 4 if open."""
    found, error = done.found, done.error_fraction
    if found.low is None and found.high is not None and not found.unclear:
        return Exit.NEGATIVE
    if error is None or not found.within(done.resolution_fraction):
        return Exit.INCONCLUSIVE
    return Exit.NEGATIVE if tolerance is not None and abs(error) > tolerance else Exit.DONE


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(help="Folder of another.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw an HTML page in this file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare two runs: what differs by more than chance."""
    runs = read_run(first), read_run(second)
    found = comparing.compare_runs(*runs, (str(first), str(second)))
    if output:
        write_atomically(output, versus_page(found, *runs))
    if json:
        typer.echo(comparing.to_json(found), nl=False)
        return
    console = Console()
    console.print(versus_table(found))
    for line in versus_lines(found):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
