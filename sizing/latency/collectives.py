"""Seconds that data spends between GPUs: collectives of a step, KV transfer."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.errors import InputError
from minicluster.specs.cluster import topology_of
from minicluster.specs.step import PathCoefficients
from sizing.latency.roofline import efficiency_of
from sizing.latency.tiered import TRAFFIC, library_s, tiered_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from minicluster.specs.cluster import ClusterSpec
    from minicluster.specs.efficiency import CollectiveTable, Tables
    from minicluster.specs.gpu import GpuSpec, MeasuredCollective
    from minicluster.specs.topology import Topology
    from sizing.latency.communication import Exchange
    from sizing.latency.term import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """
    One measured point against what follows from the others of its table.

    Attributes:
        error_fraction: predicted over measured, less 1.
        outlier: known not to follow; not read for others either.
    """

    library: str
    gpus: int
    domains: int
    size_bytes: float
    seconds: float
    predicted_s: float
    error_fraction: float
    outlier: bool


def with_gpu_points(
    measured: Sequence[MeasuredCollective], gpu: GpuSpec
) -> tuple[MeasuredCollective, ...]:
    """
    Return tables with the points that stand in the GPU's own file filled in.

    Raises:
        InputError: the GPU's file has no such table.
    """
    filled = [*measured]
    for at, table in enumerate(measured):
        if table.from_gpu is None:
            continue
        kind, _, group = table.from_gpu.partition(".")
        found = getattr(efficiency_of(gpu), kind, {}).get(group)
        if found is None:
            where = f"configs/collectives: measured.{table.library}.from_gpu"
            raise InputError(where, table.from_gpu, f"a table of configs/gpus/{gpu.name}.toml")
        points = {"size_bytes": found.size_bytes, "seconds": found.seconds}
        filled[at] = replace(table, from_gpu=None, **points)
    return tuple(filled)


def measured_s(size_bytes: ArrayLike, table: MeasuredCollective) -> NDArray[np.float64]:
    """
    Read a table of one library.

        t is linear in S between two measured sizes of one algorithm, and beyond the outermost of
        them; above the last dt/dS = 2 (n - 1)/n / busbw where it is known
        (docs/model.md, eq. H4)

    Source:
        Each algorithm is a latency and a bandwidth: MSCCL++ 6.4 us + S / 272 GB/s on one node.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    result = np.zeros_like(size)
    edges = (0.0, *table.switches_bytes, np.inf)
    for low, high in itertools.pairwise(edges):
        points = [
            (s, t)
            for s, t in zip(table.size_bytes, table.seconds, strict=True)
            if low <= s < high and s not in table.outlier_bytes
        ]
        in_range = (size >= low) & (size < high)
        if points:
            known, seconds = (np.array(column) for column in zip(*points, strict=True))
            result = np.where(in_range, _linear(size, known, seconds, table), result)
    return np.asarray(np.where(size > 0, result, 0.0))


def left_out(table: MeasuredCollective) -> Iterator[LeftOut]:
    """Predict each point of a table from the others."""
    for index, (size, seconds) in enumerate(zip(table.size_bytes, table.seconds, strict=True)):
        rest = replace(
            table,
            size_bytes=(*table.size_bytes[:index], *table.size_bytes[index + 1 :]),
            seconds=(*table.seconds[:index], *table.seconds[index + 1 :]),
        )
        predicted = float(measured_s(size, rest))
        yield LeftOut(
            library=table.library,
            gpus=table.gpus,
            domains=table.domains,
            size_bytes=size,
            seconds=seconds,
            predicted_s=predicted,
            error_fraction=predicted / seconds - 1,
            outlier=size in table.outlier_bytes,
        )


def _linear(
    size: NDArray[np.float64],
    known: NDArray[np.float64],
    seconds: NDArray[np.float64],
    table: MeasuredCollective,
) -> NDArray[np.float64]:
    if known.size == 1:
        return np.full_like(size, seconds[0])
    at = np.clip(np.searchsorted(known, size), 1, known.size - 1)
    slope = (seconds[at] - seconds[at - 1]) / (known[at] - known[at - 1])
    line = np.asarray(seconds[at - 1] + slope * (size - known[at - 1]))
    last_of_all = not any(known[-1] < switch for switch in table.switches_bytes)
    if table.bus_bytes_per_s is not None and last_of_all:
        plateau = 2 * (table.gpus - 1) / table.gpus / table.bus_bytes_per_s
        above = seconds[-1] + plateau * (size - known[-1])
        return np.where(size > known[-1], above, line)
    return line


CROSSES = "nccl"
"""The library whose collectives cross HB domains."""


def exchange_s(
    exchange: Exchange, gpu: GpuSpec, cluster: ClusterSpec, *, engine: str = ""
) -> NDArray[np.float64]:
    """
    Time one run of a collective of a step.

    Within an HB domain from the table of its pattern and group, or from the link (eq. N1);
    beyond it as NCCL was measured on such a group, or by tiers (eq. N2, docs/model.md).

    Args:
        engine: name of the engine; its own all-reduce table is taken where the GPU has one.

    Returns:
        Seconds, shape of the bytes; zero bytes cost nothing.

    Raises:
        InputError: the catalog lacks a number that is needed.
    """
    size = np.asarray(exchange.size_bytes, dtype=np.float64)
    group, stride = exchange.group, exchange.stride
    if group == 1:
        return 0 * size
    if exchange.pattern == "point-to-point":
        return point_to_point_s(size, _reaching(cluster, gpu, stride + 1), stride)
    if exchange.library is not None:
        reaching = _reaching(cluster, gpu, max(group, cluster.gpus_per_hb_domain))
        return library_s(size, exchange, exchange.library, reaching, reaching.spans(group))
    inner = max(1, min(group, cluster.gpus_per_hb_domain // stride))
    if inner >= group:
        seconds = _inside_s(size, group, exchange.pattern, gpu, engine)
    else:
        seconds = _across_s(size, inner, exchange, gpu, cluster)
    return np.where(size > 0, seconds, 0.0)


def point_to_point_s(
    size_bytes: ArrayLike,
    topology: Topology,
    distance: int,
    *,
    sending_fraction: float = 1.0,
) -> NDArray[np.float64]:
    """
    Send *size_bytes* to the GPU *distance* further on.

        t = l + S / (B e)      (docs/model.md, eq. N5)

    Args:
        size_bytes: S, any shape.
        distance: in GPU order; a pipeline stage away may be another domain.
        sending_fraction: share of a unit's GPUs that send out of it at once.

    Source:
        Link bandwidth times what large transfers achieve of it; l is a small collective's
        latency inside a domain, and one hop of the network beyond.

    Ignores:
        Stages that share a domain while others do not: where a replica is wider than the domain,
        every send is taken to leave it.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    tier = topology.tiers[topology.holding(distance + 1)]
    seconds = tier.latency_s + size / tier.achieved_bytes_per_s(sending_fraction)
    return np.where(size > 0, seconds, 0.0)


def looked_up_s(size_bytes: ArrayLike, table: CollectiveTable) -> NDArray[np.float64]:
    """
    Read a table: log-log between points, the first below them, the last bandwidth above.

        ln t is linear in ln S between two measured sizes      (docs/model.md, eq. N1)

    Source:
        Libraries switch algorithms between sizes, so that no one line fits (network tables).
    """
    size = np.maximum(1.0, np.asarray(size_bytes, dtype=np.float64))
    known, seconds = np.asarray(table.size_bytes), np.asarray(table.seconds)
    inside = np.exp(np.interp(np.log(size), np.log(known), np.log(seconds)))
    return np.asarray(inside * np.maximum(1.0, size / known[-1]))


def kv_pull_s_per_byte(
    prefill_tp: int, decode_tp: int, gpu: GpuSpec, cluster: ClusterSpec
) -> float:
    """
    Seconds per byte that one decode GPU holds of a prompt's KV cache.

        t = max(1, tp_d / tp_p) / (B_net e)      (docs/model.md, eq. N4)

    Every GPU has its own NIC, and min(tp_p, tp_d) of them work on each side: a decode GPU pulls
    its own share; a prefill GPU with several readers sends to them one after the other.

    Source:
        NIXL reads between ranks that overlap in heads, one flow a pair.

    Ignores:
        Contention of concurrent pulls (eq. N6), pools that share an HB domain.
    """
    return max(1.0, decode_tp / prefill_tp) / scale_out_bytes_per_s(gpu, cluster)


def path_coefficients(
    machine: Machine, *, prefill_tp: int, decode_tp: int, tokens: float
) -> PathCoefficients:
    """
    Return engine constants of a request, its KV pull and what this takes of uplinks.

        uplink = b_kv tp_d o / (B_net e), 0 where o is 1      (docs/model.md, eq. N4 and N6)
    """
    block, cluster = machine.engine.block_size, machine.cluster
    held = kv_bytes_per_sequence(machine.model, tokens, tp=decode_tp, block_size=block) / tokens
    per_byte = kv_pull_s_per_byte(prefill_tp, decode_tp, machine.gpu, cluster)
    pieces = machine.model.num_layers / block
    shared = oversubscription(machine.gpu, cluster)
    uplink = held * decode_tp * shared / scale_out_bytes_per_s(machine.gpu, cluster)
    return PathCoefficients(
        request_s=machine.engine.per_request_s,
        transfer_base_s=machine.engine.transfer_base_s,
        transfer_per_token_s=held * per_byte + pieces * machine.engine.transfer_per_descriptor_s,
        uplink_per_token_s=uplink if shared > 1 else 0.0,
        error_fraction=0.0,
    )


def oversubscription(gpu: GpuSpec, cluster: ClusterSpec) -> float:
    """Return the downlinks per uplink on the way between the pools, of all tiers together."""
    if not cluster.tiers:
        return 1.0
    topology = topology_of(cluster, gpu)
    return topology.tiers[pools_meet(cluster, topology)].oversubscription


def pools_meet(cluster: ClusterSpec, topology: Topology) -> int:
    """Return the tier that KV pulls cross: the named one, or the innermost that holds all GPUs."""
    if cluster.pools_meet_in is None:
        return topology.holding(cluster.max_gpus)
    return topology.index(cluster.pools_meet_in)


def scale_out_bytes_per_s(gpu: GpuSpec, cluster: ClusterSpec) -> float:
    """
    Return what one GPU achieves over the network; scale-up where there is one HB domain only.

    Over tiers: across the one that prefill and decode pools meet in, no other GPU of its unit
    sending (docs/model.md, eq. F2).
    """
    if cluster.tiers:
        topology = topology_of(cluster, gpu)
        return topology.tiers[pools_meet(cluster, topology)].achieved_bytes_per_s(0.0)
    efficiency = efficiency_of(gpu)
    peak = cluster.scale_out_bytes_per_s or gpu.scale_out_bytes_per_s
    if peak is not None:
        return peak * efficiency.scale_out_fraction
    if cluster.max_gpus <= cluster.gpus_per_hb_domain:
        return gpu.require("scale_up_bytes_per_s") * efficiency.scale_up_fraction
    expected = "the network bandwidth per GPU: the cluster is wider than one HB domain"
    raise InputError(f"cluster {cluster.name}: scale_out_bytes_per_s", None, expected)


def _inside_s(
    size: NDArray[np.float64], group: int, pattern: str, gpu: GpuSpec, engine: str
) -> NDArray[np.float64]:
    """
    Time a collective inside an HB domain.

        t from the table; without one t = l log2 g + f(g) S / (B e)      (docs/model.md, eq. N1)

    f is `TRAFFIC`. A group between two tables takes the wider one's; one wider than all takes
    the widest table's, its bytes scaled by f and its latency by the logarithm (eq. N3).
    """
    efficiency = efficiency_of(gpu).of_engine(engine)
    tables: Tables = {
        "all-reduce": efficiency.all_reduce,
        "all-gather": efficiency.all_gather,
        "reduce-scatter": efficiency.reduce_scatter,
        "all-to-all": efficiency.all_to_all,
    }[pattern]
    per_s = gpu.require("scale_up_bytes_per_s") * efficiency.scale_up_fraction
    if not tables:
        latency = efficiency.collective_latency_s * math.log2(group)
        return np.asarray(latency + TRAFFIC[pattern](group) * size / per_s)
    known = sorted(int(key) for key in tables)
    nearest = next((key for key in known if key >= group), known[-1])
    seconds = looked_up_s(size, tables[str(nearest)])
    if group <= nearest:
        return seconds
    latency = tables[str(nearest)].seconds[0]
    hops = math.log2(group) / math.log2(nearest)
    traffic = TRAFFIC[pattern](group) / TRAFFIC[pattern](nearest)
    return np.asarray(latency * hops + (seconds - latency) * traffic)


def _across_s(
    size: NDArray[np.float64], inner: int, exchange: Exchange, gpu: GpuSpec, cluster: ClusterSpec
) -> NDArray[np.float64]:
    """
    Time a collective over several domains, *inner* GPUs in each.

        t as NCCL was measured on such a group (eq. H4), else by tiers and the least of its
        protocols (eq. H2, H3)      (docs/model.md, eq. N2)

    Libraries of engines stay in one domain: NCCL takes over where a group leaves it.
    """
    group = exchange.group
    table = next(
        (
            table
            for table in gpu.collectives.measured
            if (table.library, table.pattern) == (CROSSES, exchange.pattern)
            and (table.gpus, table.domains) == (group, math.ceil(group / inner))
            and exchange.stride == 1
        ),
        None,
    )
    topology = _reaching(cluster, gpu, group * exchange.stride)
    spans = topology.spans(group, exchange.stride)
    formula = tiered_s(size, exchange.pattern, topology, spans, gpu.collectives.protocols)
    if table is None or table.between_bytes_per_s is None:
        return formula
    tier = topology.tiers[topology.holding(group)]
    own, measured_with = tier.bytes_per_s / tier.oversubscription, table.between_bytes_per_s
    measured = measured_s(size, table)
    if own == measured_with:
        return measured
    return np.minimum(formula, measured) if own > measured_with else np.maximum(formula, measured)


def _reaching(cluster: ClusterSpec, gpu: GpuSpec, gpus: int) -> Topology:
    """Return the network of a cluster; one without tiers is as wide as *gpus* neighbours need."""
    return topology_of(cluster if cluster.tiers else replace(cluster, max_gpus=gpus), gpu)
