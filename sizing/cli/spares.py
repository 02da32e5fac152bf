"""`sizing spares`: parts beyond those needed, for an availability."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from minicluster.errors import InputError
from minicluster.specs.scenario import ClusterChoice
from sizing import catalog
from sizing.network.spares import spares as fewest

HOUR = 3600.0


def spares(  # noqa: PLR0913, PLR0917  (one option a number)
    needed: Annotated[int, typer.Argument(help="parts that have to work")],
    gpus_each: Annotated[
        int, typer.Option(help="GPUs of a part, any of which takes it down (node: 8)")
    ] = 1,
    availability: Annotated[float, typer.Option(help="share of time, 0.999 for example")] = 0.999,
    cluster: Annotated[str | None, typer.Option(help="preset with MTBF and repair time")] = None,
    mtbf_hours: Annotated[float | None, typer.Option(help="of one GPU, or of one part")] = None,
    repair_hours: Annotated[float | None, typer.Option(help="until a part works again")] = None,
    crews: Annotated[int | None, typer.Option(help="repairs at a time [default: any]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print exactly the data")] = False,
) -> None:
    """Fewest spare GPUs, nodes, replicas or switches that keep NEEDED of them working."""
    mtbf_s, repair_s = _times(cluster, mtbf_hours, repair_hours)
    if gpus_each < 1:
        raise InputError("--gpus-each", gpus_each, "1 or more")
    found = fewest(
        needed,
        mtbf_s=mtbf_s / gpus_each,
        repair_s=repair_s,
        availability=availability,
        crews=crews,
    )
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
        return
    Console().print(
        f"{found.spares} spares for {needed}: {found.availability:.6%} available,"
        f" {found.without:.4%} without any; {found.failures_in_repair:.3g} under repair on average",
        highlight=False,
    )


def _times(
    cluster: str | None, mtbf_hours: float | None, repair_hours: float | None
) -> tuple[float, float]:
    """Return MTBF and repair time, the preset's where they are not given."""
    mtbf_s = None if mtbf_hours is None else mtbf_hours * HOUR
    repair_s = None if repair_hours is None else repair_hours * HOUR
    if cluster is not None:
        spec = catalog.find_cluster(ClusterChoice(preset=cluster), place="--cluster")
        if spec.failures is None:
            raise InputError("--cluster", cluster, "a preset with [failures]")
        mtbf_s = mtbf_s or spec.failures.gpu_mtbf_s
        repair_s = repair_s or spec.failures.node_repair_s
    if mtbf_s is None or repair_s is None:
        key = "--mtbf-hours" if mtbf_s is None else "--repair-hours"
        raise InputError(key, None, "a number, or a --cluster that has it")
    return mtbf_s, repair_s
