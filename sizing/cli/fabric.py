"""`sizing fabric`: topology, collectives, bill of materials, rail-only study, flow collisions."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from minicluster.errors import InputError
from minicluster.pages.write import write_page
from sizing import catalog
from sizing.latency.collectives import CROSSES
from sizing.latency.library import left_out, with_gpu_points
from sizing.network.bom import NetworkOrder, bill
from sizing.network.bom_as_built import built_bill
from sizing.network.collective import Question, answer
from sizing.network.ecmp import Hashing, collisions
from sizing.network.rail_only_study import study
from sizing.report.fabric import (
    answer_table,
    bill_table,
    built_table,
    collisions_table,
    left_out_table,
    study_tables,
    topology_table,
)
from sizing.report.rail_only import study_page

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table


app = typer.Typer(
    help="Topologies, collectives on them, bills of materials, the rail-only study.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="print exactly the data")]
Cluster = Annotated[str, typer.Option(help="a cluster preset, or a file like one")]


def register(root: typer.Typer) -> None:
    """Add `fabric` to `sizing`."""
    root.add_typer(app, name="fabric")


@app.command()
def topology(
    cluster: Annotated[str, typer.Argument(help="a cluster preset, or a file like one")],
    as_json: AsJson = False,
) -> None:
    """Show the tiers of a network: sizes, bandwidth, latency, oversubscription."""
    spec, found = catalog.find_network(cluster)
    tiers = [
        asdict(tier)
        | {"units": found.units(i), "all_send_bytes_per_s": tier.achieved_bytes_per_s()}
        for i, tier in enumerate(found.tiers)
    ]
    data = {
        "name": found.name,
        "gpu": spec.gpu,
        "gpus": found.gpus,
        "gpus_per_node": found.gpus_per_node,
        "nodes": len(spec.nodes) or found.gpus // found.gpus_per_node,
        "tiers": tiers,
        "fabric": None if spec.fabric is None else asdict(spec.fabric),
        "failures": None if spec.failures is None else asdict(spec.failures),
        "scale_up_over_scale_out": (
            found.tiers[0].bytes_per_s / found.tiers[1].bytes_per_s
            if len(found.tiers) > 1
            else None
        ),
    }
    _show(data, [topology_table(found)], as_json=as_json)


@app.command()
def collective(  # noqa: PLR0913, PLR0917  (a command's options)
    cluster: Cluster = "dgx-h100",
    pattern: Annotated[str, typer.Option(help="all-reduce, all-gather, …")] = "all-reduce",
    group: Annotated[int, typer.Option(help="GPUs that take part")] = 8,
    stride: Annotated[int, typer.Option(help="between neighbours of the group")] = 1,
    size_bytes: Annotated[float, typer.Option("--bytes", help="S of eq. N1")] = 65536,
    library: Annotated[str | None, typer.Option(help="nccl, mscclpp or custom")] = None,
    sending_fraction: Annotated[
        float, typer.Option(help="point-to-point: share of a unit's GPUs that send at once")
    ] = 1.0,
    check: Annotated[bool, typer.Option(help="each table point from the others")] = False,
    as_json: AsJson = False,
) -> None:
    """Time a collective over the tiers of a network."""
    spec, found = catalog.find_network(cluster, place="--cluster")
    gpu = catalog.find_gpu(spec.gpu)
    measured = with_gpu_points(gpu.collectives.measured, gpu)
    if check:
        rows = [row for table in measured for row in left_out(table)]
        _show([asdict(row) for row in rows], [left_out_table(rows)], as_json=as_json)
        return
    asked = Question(
        pattern=pattern,
        group=group,
        stride=stride,
        size_bytes=size_bytes,
        sending_fraction=sending_fraction,
        rail_only=spec.fabric is not None and spec.fabric.kind == "rail-only",
    )
    result = answer(
        asked,
        found,
        measured=measured,
        protocols=gpu.collectives.protocols if library in (None, CROSSES) else (),
        library=library,
    )
    _show(asdict(result), [answer_table(result)], as_json=as_json)


@app.command()
def bom(  # noqa: PLR0913, PLR0917  (a command's options)
    gpus: Annotated[int | None, typer.Option(help="endpoints")] = None,
    hb_size: Annotated[int, typer.Option(help="GPUs of an HB domain, one rail each")] = 8,
    radix: Annotated[int, typer.Option(help="ports of a switch")] = 64,
    kind: Annotated[str, typer.Option(help="clos, rail-optimised or rail-only")] = "clos",
    dac_tiers: Annotated[int, typer.Option(help="lowest tiers in copper")] = 0,
    spares: Annotated[int, typer.Option(help="spare switches of each tree")] = 0,
    price_ratio: Annotated[float, typer.Option(help="switch port : transceiver")] = 2.0,
    switch_port_power_w: Annotated[float | None, typer.Option(help="of one port")] = None,
    transceiver_power_w: Annotated[float | None, typer.Option(help="of one")] = None,
    preset: Annotated[str | None, typer.Option(help="a cluster as it was built")] = None,
    as_json: AsJson = False,
) -> None:
    """Count switches, links, transceivers and relative cost of a network."""
    if preset is not None:
        spec, _ = catalog.find_network(preset, place="--preset")
        built = built_bill(spec, catalog.switches(), price_ratio=price_ratio)
        _show(asdict(built), [built_table(built)], as_json=as_json)
        return
    if gpus is None:
        raise InputError("--gpus", None, "how many endpoints", "or --preset NAME")
    order = NetworkOrder(
        gpus=gpus,
        hb_size=hb_size,
        radix=radix,
        kind=kind,
        dac_tiers=dac_tiers,
        spares=spares,
        price_ratio=price_ratio,
        switch_port_power_w=switch_port_power_w,
        transceiver_power_w=transceiver_power_w,
    )
    found = bill(order)
    _show(asdict(found), [bill_table(found)], as_json=as_json)


@app.command(name="rail-only")
def rail_only(
    name: Annotated[str, typer.Option("--study", help="conventions")] = "rail-only",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="hb_sizes=[32,64]")
    ] = None,
    price_ratio: Annotated[float, typer.Option(help="switch port : transceiver")] = 2.0,
    html: Annotated[Path | None, typer.Option(help="page of charts to write")] = None,
    as_json: AsJson = False,
) -> None:
    """What rails and wide HB domains do to training, under a study's own conventions."""
    found = study(catalog.find_study(name, overrides or []), price_ratio=price_ratio)
    if html is not None:
        write_page(html, study_page(found))
    _show(asdict(found), study_tables(found), as_json=as_json)


@app.command()
def ecmp(
    pairs: Annotated[int, typer.Option(help="GPU pairs that send at once")] = 16,
    uplinks: Annotated[int, typer.Option(help="of the switch")] = 16,
    flows: Annotated[list[int] | None, typer.Option(help="of a pair; repeatable")] = None,
    trials: Annotated[int, typer.Option(help="random hashes")] = 10_000,
    seed: Annotated[int, typer.Option(help="of the random numbers")] = 0,
    as_json: AsJson = False,
) -> None:
    """How evenly hashed flows fill the uplinks of a switch."""
    found = [
        collisions(Hashing(pairs=pairs, uplinks=uplinks, flows=count), trials=trials, seed=seed)
        for count in flows or [1, 16]
    ]
    _show([asdict(one) for one in found], [collisions_table(found)], as_json=as_json)


def _show(data: object, tables: Iterable[Table], *, as_json: bool) -> None:
    """Print data or tables."""
    if as_json:
        plain: Any = data
        sys.stdout.write(json.dumps(plain, indent=2, sort_keys=True) + "\n")
        return
    console = Console()
    for table in tables:
        console.print(table)
