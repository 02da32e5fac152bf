"""Seconds that data spends between GPUs: all-reduce, all-gather, KV transfer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sizing.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from sizing.specs.cluster import ClusterSpec
    from sizing.specs.gpu import GpuEfficiency, GpuSpec

OVERLAP_LEFT = 0.2
"""Share of the shorter tier that a hierarchical all-reduce does not hide behind the longer one."""


def all_reduce_s(
    size_bytes: ArrayLike, group: int, gpu: GpuSpec, cluster: ClusterSpec
) -> NDArray[np.float64]:
    """
    Sum *size_bytes* over *group* GPUs, the result on each.

        t = l(g) + 2 (g - 1) / g S / B                              (docs/model.md, eq. N1)
        t = l(g) + 2 ceil(log2 k) l_net + max(t_i, t_o) + 0.2 min(t_i, t_o),
        t_i = 2 (g - 1) / g S / B,  t_o = 2 (k - 1) / (k g) S / B_net     (eq. N2)

    Args:
        size_bytes: S, any shape; zero costs nothing.
        group: GPUs; those beyond the HB domain are reached over the network (eq. N2).
        gpu: bandwidths, latencies.
        cluster: g, the size of the HB domain, and the network.

    Returns:
        Seconds, shape of *size_bytes*.

    Raises:
        InputError: the catalog lacks a number that is needed.

    Source:
        Ring and NVLS bus bandwidth as NCCL counts it; the tiers overlap as measured on 2 and 4
        nodes of H100, H200 and B200 (within 11 %).

    Ignores:
        Algorithm switches between message sizes; contention with the KV transfer.

    """
    size = np.asarray(size_bytes, dtype=np.float64)
    if group == 1:
        return 0 * size
    inner = min(group, cluster.gpus_per_hb_domain)
    moved = size > 0
    local = 2 * (inner - 1) / inner * size / _bus_bytes_per_s(inner, gpu) if inner > 1 else 0 * size
    latency = _latency_s(inner, gpu)
    if group <= cluster.gpus_per_hb_domain:
        return np.asarray(local + latency * moved)
    domains = math.ceil(group / inner)
    network = 2 * (domains - 1) / (domains * inner) * size / scale_out_bytes_per_s(gpu, cluster)
    latency += 2 * math.ceil(math.log2(domains)) * _hop_s(cluster)
    overlapped = np.maximum(local, network) + OVERLAP_LEFT * np.minimum(local, network)
    return np.asarray(overlapped + latency * moved)


def all_gather_s(
    size_bytes: ArrayLike, group: int, gpu: GpuSpec, cluster: ClusterSpec
) -> NDArray[np.float64]:
    """
    Collect *size_bytes*, spread evenly over *group* GPUs, on each of them.

        Half of an all-reduce of the same size, at the same latency.      (docs/model.md, eq. N3)

    Args:
        size_bytes: S, the whole, any shape.
        group: GPUs.
        gpu: bandwidths, latencies.
        cluster: the network.

    Returns:
        Seconds, shape of *size_bytes*.

    Source:
        A ring all-reduce is a reduce-scatter and an all-gather of equal traffic.

    Ignores:
        NVLS, which speeds up the reduction only.

    """
    size = np.asarray(size_bytes, dtype=np.float64)
    nothing = all_reduce_s(np.where(size > 0, 1e-9, 0.0), group, gpu, cluster)
    return np.asarray(nothing + (all_reduce_s(size, group, gpu, cluster) - nothing) / 2)


def kv_pull_s_per_byte(
    prefill_tp: int, decode_tp: int, gpu: GpuSpec, cluster: ClusterSpec
) -> float:
    """
    Seconds per byte that one decode GPU holds of a prompt's KV cache.

        t = max(1, tp_d / tp_p) / (B_net e)      (docs/model.md, eq. N4)

    Every GPU has its own NIC, and min(tp_p, tp_d) of them work on each side: a decode GPU pulls
    its own share; a prefill GPU with several readers sends to them one after the other.

    Args:
        prefill_tp: tp_p.
        decode_tp: tp_d.
        gpu: its network bandwidth, or scale-up where it has no network.
        cluster: overrides the network bandwidth.

    Returns:
        Seconds per byte.

    Source:
        NIXL reads between ranks that overlap in heads, one flow a pair.

    Ignores:
        Contention of concurrent pulls, cost per descriptor, pools that share an HB domain.

    """
    return max(1.0, decode_tp / prefill_tp) / scale_out_bytes_per_s(gpu, cluster)


def scale_out_bytes_per_s(gpu: GpuSpec, cluster: ClusterSpec) -> float:
    """Return what one GPU achieves over the network; scale-up where there is one HB domain only."""
    efficiency = _efficiency(gpu)
    peak = cluster.scale_out_bytes_per_s or gpu.scale_out_bytes_per_s
    if peak is not None:
        return peak * efficiency.scale_out_fraction
    if cluster.max_gpus <= cluster.gpus_per_hb_domain:
        return gpu.require("scale_up_bytes_per_s") * efficiency.scale_up_fraction
    raise InputError(
        f"cluster {cluster.name}: scale_out_bytes_per_s",
        None,
        "the network bandwidth per GPU: the cluster is wider than one HB domain",
    )


def _bus_bytes_per_s(group: int, gpu: GpuSpec) -> float:
    """Bus bandwidth of a large all-reduce inside the HB domain, measured where it was."""
    efficiency = _efficiency(gpu)
    measured = efficiency.allreduce_bus_bytes_per_s.get(str(group))
    if measured is not None:
        return measured
    return gpu.require("scale_up_bytes_per_s") * efficiency.scale_up_fraction


def _latency_s(group: int, gpu: GpuSpec) -> float:
    """Fixed part inside the HB domain, that of the next larger group that was measured."""
    if group == 1:
        return 0.0
    known = sorted(
        (int(size), value) for size, value in _efficiency(gpu).allreduce_latency_s.items()
    )
    if not known:
        raise InputError(
            f"gpu {gpu.name}: efficiency.allreduce_latency_s", None, "at least one group size"
        )
    return next((value for size, value in known if size >= group), known[-1][1])


def _hop_s(cluster: ClusterSpec) -> float:
    """One hop between nodes."""
    if cluster.scale_out_latency_s is None:
        raise InputError(
            f"cluster {cluster.name}: scale_out_latency_s",
            None,
            "the latency of one hop: tensor parallelism crosses the HB domain",
        )
    return cluster.scale_out_latency_s


def _efficiency(gpu: GpuSpec) -> GpuEfficiency:
    """Return the efficiencies, or say which GPU lacks them."""
    if gpu.efficiency is None:
        raise InputError(f"gpu {gpu.name}: efficiency", None, "efficiencies of a catalog GPU")
    return gpu.efficiency
