"""Cluster presets and switches."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING

from minicluster.config import parse, read_toml
from minicluster.errors import InputError
from minicluster.specs.cluster import ClusterSpec, topology_of
from minicluster.specs.fabric import FailureSpec, SwitchSpec
from minicluster.specs.topology import BANDWIDTH_WAY_OUT, TierSpec, Topology
from sizing.catalog.folder import Catalog, find_file, unknown
from sizing.catalog.gpu import find_gpu, gpus

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from minicluster.specs.scenario import ClusterChoice

BANDWIDTH = re.compile(r"band|bw|bps|_per_s|gb|gbit", re.IGNORECASE)
"""Pattern of misspelt keys that mean a bandwidth."""


@cache
def clusters() -> Mapping[str, ClusterSpec]:
    """Return the cluster presets."""
    return Catalog("clusters", read_cluster)


@cache
def switches() -> Mapping[str, SwitchSpec]:
    """Return the catalog of network switches."""
    return Catalog("switches", lambda path: parse(SwitchSpec, read_toml(path), place=path.name))


def read_cluster(path: Path) -> ClusterSpec:
    """
    Read a cluster file.

    Raises:
        InputError: the first thing wrong with it; for a bandwidth without a unit, how to
            say one.
    """
    raw = read_toml(path)
    tiers = raw.get("tiers", [])
    known = {spec.name for spec in fields(TierSpec)}
    for tier in tiers if isinstance(tiers, list) else []:
        for key in tier if isinstance(tier, dict) else ():
            if key not in known and BANDWIDTH.search(key):
                place = f"{path.name}: tiers.{tier.get('name', '?')}.{key}"
                raise InputError(place, tier[key], "a key that says its unit", BANDWIDTH_WAY_OUT)
    return parse(ClusterSpec, raw, place=path.name)


def find_network(name: str, *, place: str = "cluster") -> tuple[ClusterSpec, Topology]:
    """
    Return a cluster and its network by the name of a preset or the path of a file like one.

    Raises:
        InputError: neither, or something is wrong with it.
    """
    expectation = "a cluster preset or a file like one"
    cluster = read_cluster(find_file("clusters", name, place=place, expectation=expectation))
    return cluster, topology_of(cluster, find_gpu(cluster.gpu, place=f"{name}: gpu"))


def find_cluster(choice: ClusterChoice, *, place: str = "cluster") -> ClusterSpec:
    """
    Return the preset with the scenario's own keys over it, or a cluster made of them alone.

    A GPU without a preset makes nodes in which scale-up links join all GPUs.
    """
    base = _own_cluster(choice, place) if choice.preset is None else _preset(choice, place)
    return replace(
        base,
        max_gpus=choice.max_gpus or base.max_gpus,
        pools_meet_in=choice.pools_meet_in or base.pools_meet_in,
        failures=_failures(choice, base.failures, place),
    )


def _preset(choice: ClusterChoice, place: str) -> ClusterSpec:
    name = choice.preset or ""
    if name not in clusters():
        if name in gpus():
            way_out = f'{name} is a GPU: cluster.gpu = "{name}", with gpus_per_node and max_gpus'
            raise InputError(f"{place}.preset", name, "a cluster preset", way_out)
        raise unknown(f"{place}.preset", name, "a cluster preset", clusters())
    preset = clusters()[name]
    gpu = find_gpu(choice.gpu, place=f"{place}.gpu").name if choice.gpu else preset.gpu
    per_node = choice.gpus_per_node or preset.gpus_per_node
    kept = preset.gpus_per_hb_domain if per_node == preset.gpus_per_node else per_node
    return replace(preset.with_nodes(per_node, kept), gpu=gpu)


def _failures(choice: ClusterChoice, preset: FailureSpec | None, place: str) -> FailureSpec | None:
    mtbf_s = choice.gpu_mtbf_s or (preset.gpu_mtbf_s if preset else None)
    repair_s = choice.repair_s or (preset.node_repair_s if preset else None)
    if mtbf_s is None and repair_s is None:
        return None
    if mtbf_s is None or repair_s is None:
        key = "gpu_mtbf_s" if mtbf_s is None else "repair_s"
        expected = "a number: gpu_mtbf_s and repair_s are given together"
        raise InputError(f"{place}.{key}", None, expected)
    base = preset or FailureSpec(gpu_mtbf_s=mtbf_s, node_repair_s=repair_s)
    return replace(base, gpu_mtbf_s=mtbf_s, node_repair_s=repair_s)


def _own_cluster(choice: ClusterChoice, place: str) -> ClusterSpec:
    gpu = find_gpu(choice.gpu or "", place=f"{place}.gpu")
    if choice.gpus_per_node is None or choice.max_gpus is None:
        key = "gpus_per_node" if choice.gpus_per_node is None else "max_gpus"
        names = [name for name, cluster in clusters().items() if cluster.gpu == gpu.name]
        way_out = f"presets of this GPU: {', '.join(names) or 'none'}"
        expected = "a number: there is no preset to take it from"
        raise InputError(f"{place}.{key}", None, expected, way_out)
    return ClusterSpec(
        name=f"{gpu.name}-{choice.gpus_per_node}",
        gpu=gpu.name,
        gpus_per_node=choice.gpus_per_node,
        gpus_per_hb_domain=choice.gpus_per_node,
        max_gpus=choice.max_gpus,
    )
