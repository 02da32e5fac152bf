"""`sizing fabric` and `sizing spares`: networks, their cost and collectives, spare parts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer import Argument, Option

from minicluster.errors import InputError
from minicluster.pages.write import write_page
from sizing.cli.common import AsJson, Html, show, with_keys
from sizing.network.bom import NetworkOrder

app = typer.Typer(
    help="Topologies, collectives on them, bills of materials, the rail-only study.",
    no_args_is_help=True,
)

Cluster = Annotated[str, Option(help="Cluster preset, or a file with the same keys")]

HOUR_S = 3600.0


@app.command()
def topology(
    cluster: Annotated[str, Argument(help="Cluster preset, or a file with the same keys")],
    as_json: AsJson = False,
) -> None:
    """Show the tiers of a network: sizes, bandwidth, latency, oversubscription."""
    from sizing import catalog
    from sizing.report.fabric import topology_table

    spec, found = catalog.find_network(cluster)
    tiers = [
        asdict(tier)
        | {"units": found.units(i), "all_send_bytes_per_s": tier.achieved_bytes_per_s()}
        for i, tier in enumerate(found.tiers)
    ]
    rates = [tier.bytes_per_s for tier in found.tiers]
    data = {
        "name": found.name,
        "gpu": spec.gpu,
        "gpus": found.gpus,
        "gpus_per_node": found.gpus_per_node,
        "nodes": len(spec.nodes) or found.gpus // found.gpus_per_node,
        "tiers": tiers,
        "fabric": None if spec.fabric is None else asdict(spec.fabric),
        "failures": None if spec.failures is None else asdict(spec.failures),
        "scale_up_over_scale_out": rates[0] / rates[1] if len(rates) > 1 else None,
    }
    show(data, topology_table(found), as_json=as_json)


@app.command()
def collective(  # noqa: PLR0913, PLR0917  (a command's options)
    cluster: Cluster = "dgx-h100",
    pattern: Annotated[str, Option(help="Collective: all-reduce, all-gather, …")] = "all-reduce",
    group: Annotated[int, Option(help="Number of GPUs in the group")] = 8,
    stride: Annotated[int, Option(help="Distance in GPUs between neighbours of the group")] = 1,
    size_bytes: Annotated[float, Option("--bytes", help="Size of the message in bytes")] = 65536,
    library: Annotated[str | None, Option(help="Library: nccl, mscclpp or custom")] = None,
    sending_fraction: Annotated[
        float, Option(help="Share of a unit's GPUs that send at once, point-to-point")
    ] = 1.0,
    check: Annotated[
        bool, Option(help="Error of each table point, interpolated from the others")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time a collective over the tiers of a network."""
    from sizing import catalog
    from sizing.latency.collectives import CROSSES, left_out, with_gpu_points
    from sizing.network.collective import Question, answer
    from sizing.report.fabric import answer_table, left_out_table

    spec, found = catalog.find_network(cluster, place="--cluster")
    gpu = catalog.find_gpu(spec.gpu)
    measured = with_gpu_points(gpu.collectives.measured, gpu)
    if check:
        rows = [row for table in measured for row in left_out(table)]
        show([asdict(row) for row in rows], left_out_table(rows), as_json=as_json)
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
    show(asdict(result), answer_table(result), as_json=as_json)


@app.command()
@with_keys(NetworkOrder)
def bom(
    preset: Annotated[str | None, Option(help="Cluster preset as it was built")] = None,
    as_json: AsJson = False,
    **keys: Any,  # noqa: ANN401  (one option a key of `NetworkOrder`)
) -> None:
    """Count switches, links, transceivers and relative cost of a network."""
    from sizing import catalog
    from sizing.network.bom import bill, built_bill
    from sizing.report.fabric import bill_table, built_table

    given = {key: value for key, value in keys.items() if value is not None}
    if preset is not None:
        spec, _ = catalog.find_network(preset, place="--preset")
        price = {key: given[key] for key in ("price_ratio",) if key in given}
        built = built_bill(spec, catalog.switches(), **price)
        show(asdict(built), built_table(built), as_json=as_json)
        return
    if "gpus" not in given:
        raise InputError("--gpus", None, "how many endpoints", "or --preset NAME")
    found = bill(NetworkOrder(**given))
    show(asdict(found), bill_table(found), as_json=as_json)


@app.command(name="rail-only")
def rail_only(
    name: Annotated[str, Option("--study", help="Study whose conventions to use")] = "rail-only",
    overrides: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Key of the study to override, such as hb_sizes=[32,64]; repeatable",
        ),
    ] = None,
    price_ratio: Annotated[
        float, Option(help="Price of a switch port over that of a transceiver")
    ] = 2.0,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Compare rail-only networks and wide HB domains for training, by a study's conventions."""
    from sizing.network.rail_only_study import find_study, study
    from sizing.report.fabric import study_page, study_tables

    found = study(find_study(name, overrides or []), price_ratio=price_ratio)
    if html is not None:
        write_page(html, study_page(found))
    show(asdict(found), *study_tables(found), as_json=as_json)


@app.command()
def ecmp(
    pairs: Annotated[int, Option(help="Number of GPU pairs that send at once")] = 16,
    uplinks: Annotated[int, Option(help="Uplinks of the switch")] = 16,
    flows: Annotated[list[int] | None, Option(help="Flows per pair; repeatable")] = None,
    trials: Annotated[int, Option(help="Number of random hashes")] = 10_000,
    seed: Annotated[int, Option(help="Seed of the random hashes")] = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate how evenly hashed flows fill the uplinks of a switch."""
    from sizing.network.ecmp import Hashing, collisions
    from sizing.report.fabric import collisions_table

    found = [
        collisions(Hashing(pairs=pairs, uplinks=uplinks, flows=count), trials=trials, seed=seed)
        for count in flows or [1, 16]
    ]
    show([asdict(one) for one in found], collisions_table(found), as_json=as_json)


def spares(  # noqa: PLR0913, PLR0917  (one option a number)
    needed: Annotated[int, Argument(help="Number of parts that must work")],
    gpus_each: Annotated[
        int, Option(help="GPUs per part, any of which takes it down (8 for a node)")
    ] = 1,
    availability: Annotated[
        float, Option(help="Share of time in which they must work, such as 0.999")
    ] = 0.999,
    cluster: Annotated[str | None, Option(help="Cluster preset with MTBF and repair time")] = None,
    mtbf_hours: Annotated[
        float | None, Option(help="Mean time between failures of one GPU, in hours")
    ] = None,
    repair_hours: Annotated[
        float | None, Option(help="Hours until a failed part works again")
    ] = None,
    crews: Annotated[int | None, Option(help="Repairs at a time [default: unlimited]")] = None,
    as_json: AsJson = False,
) -> None:
    """Count the spare GPUs, nodes, replicas or switches that keep NEEDED of them working."""
    from sizing.network.spares import spares as fewest_spares

    mtbf_s, repair_s = _times(cluster, mtbf_hours, repair_hours)
    if gpus_each < 1:
        raise InputError("--gpus-each", gpus_each, "1 or more")
    found = fewest_spares(
        needed, mtbf_s=mtbf_s / gpus_each, repair_s=repair_s, availability=availability, crews=crews
    )
    said = (
        f"{found.spares} spares for {needed}: {found.availability:.6%} available,"
        f" {found.without:.4%} without any; {found.failures_in_repair:.3g} under repair on average"
    )
    show(asdict(found), said, as_json=as_json)


def _times(
    cluster: str | None, mtbf_hours: float | None, repair_hours: float | None
) -> tuple[float, float]:
    """Return MTBF and repair time in seconds, those of the preset where an option is absent."""
    from minicluster.specs.scenario import ClusterChoice
    from sizing import catalog

    if cluster is not None:
        failures = catalog.find_cluster(ClusterChoice(preset=cluster), place="--cluster").failures
        if failures is None:
            raise InputError("--cluster", cluster, "a preset with [failures]")
        mtbf_hours = mtbf_hours or failures.gpu_mtbf_s / HOUR_S
        repair_hours = repair_hours or failures.node_repair_s / HOUR_S
    if mtbf_hours is None or repair_hours is None:
        key = "--mtbf-hours" if mtbf_hours is None else "--repair-hours"
        raise InputError(key, None, "a number, or a --cluster that has it")
    return mtbf_hours * HOUR_S, repair_hours * HOUR_S
