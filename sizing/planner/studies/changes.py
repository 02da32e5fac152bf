"""Inputs with one number changed that is no single key of a scenario: lengths, links."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minicluster.specs.cluster import topology_of
from sizing.latency.collectives import pools_meet
from sizing.planner.configuration import with_load

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Inputs
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.workload import Lengths, RequestClass


def stretched(lengths: Lengths, factor: float) -> Lengths:
    """Stretch a distribution of lengths, each at least one token."""

    def whole(value: int | None) -> int | None:
        return None if value is None else max(1, round(value * factor))

    return replace(
        lengths,
        mean=whole(lengths.mean),
        low=whole(lengths.low),
        high=whole(lengths.high),
        median=None if lengths.median is None else max(1.0, lengths.median * factor),
    )


def with_lengths(inputs: Inputs, *, prompts: float = 1.0, answers: float = 1.0) -> Inputs:
    """Stretch prompts and answers by factors; the share of a prompt that is cached stays."""

    def longer(part: RequestClass) -> dict[str, Any]:
        own = (part.input_tokens, prompts), (part.output_tokens, answers)
        each = (each and stretched(each, factor) for each, factor in own)
        changed = dict(zip(("input_tokens", "output_tokens"), each, strict=True))
        rows = tuple(
            (max(1, round(prompt * prompts)), max(1, round(answer * answers)), number)
            for prompt, answer, number in part.lengths
        )
        prefix_tokens = round(part.prefix_tokens * prompts)
        return {**changed, "lengths": rows, "prefix_tokens": prefix_tokens}

    return with_parts(inputs, longer)


def with_parts(inputs: Inputs, change: Callable[[RequestClass], dict[str, Any]]) -> Inputs:
    """Change keys of each class of requests, or of the load where there are none."""
    load = inputs.scenario.workload
    if not load.classes:
        return with_load(inputs, replace(load, **change(*load.parts)))
    classes = tuple(replace(each, **change(each)) for each in load.classes)
    total = sum(each.requests_per_s for each in classes)
    return with_load(inputs, replace(load, classes=classes, requests_per_s=total))


def with_demand(inputs: Inputs, factor: float) -> Inputs:
    """Scale the users of each class of requests, and the rates of those without."""

    def scaled(part: RequestClass) -> dict[str, Any]:
        users = None if part.users is None else max(1, round(part.users * factor))
        return {"users": users, "requests_per_s": part.requests_per_s * factor}

    return with_parts(inputs, scaled)


def with_prefix(inputs: Inputs, fraction: float) -> Inputs:
    """Cache a share of the shortest prompt of every request, less than all of it."""

    def cached(part: RequestClass) -> dict[str, Any]:
        shortest = part.shortest_prompt_tokens
        return {"prefix_tokens": min(round(shortest * fraction), shortest - 1)}

    return with_parts(inputs, cached)


def link_bytes_per_s(inputs: Inputs) -> float | None:
    """Return the slowest link beyond the HB domain, a GPU and one way; `None`: none is known."""
    cluster = inputs.cluster
    peak = cluster.scale_out_bytes_per_s or inputs.gpu.scale_out_bytes_per_s
    stated = [tier.one_way_bytes_per_s for tier in cluster.tiers[1:]]
    return min((each for each in (peak, *stated) if each is not None), default=None)


def with_links(inputs: Inputs, factor: float) -> Inputs:
    """Scale the network beyond the HB domain: that of every GPU and of every tier."""
    cluster = inputs.cluster
    said = cluster.scale_out_bytes_per_s
    tiers = [*cluster.tiers]
    for at, tier in enumerate(tiers[1:], start=1):
        before = tier.one_way_bytes_per_s
        if before is not None:
            speed = before * factor
            tiers[at] = replace(
                tier, bytes_per_s=speed, gbyte_per_s=None, gbit_per_s=None, two_way=False
            )
    return replace(
        inputs,
        gpu=_with_link(inputs.gpu, said, factor),
        other_gpus=tuple(_with_link(gpu, said, factor) for gpu in inputs.other_gpus),
        cluster=replace(cluster, scale_out_bytes_per_s=None, tiers=tuple(tiers)),
    )


def _with_link(gpu: GpuSpec, said: float | None, factor: float) -> GpuSpec:
    peak = said or gpu.scale_out_bytes_per_s
    return replace(gpu, scale_out_bytes_per_s=None if peak is None else peak * factor)


def spine_oversubscription(inputs: Inputs) -> float | None:
    """Return downlinks per uplink of the tier where the pools meet; `None`: there is no network."""
    tiers = inputs.cluster.tiers
    at = _spine(inputs) if tiers else 0
    return tiers[at].oversubscription if at else None


def with_spine(inputs: Inputs, ratio: float) -> Inputs:
    """Change the downlinks per uplink of the tier that the pools meet in."""
    cluster, at = inputs.cluster, _spine(inputs)
    tiers = [*cluster.tiers]
    tiers[at] = replace(tiers[at], oversubscription=ratio)
    return replace(inputs, cluster=replace(cluster, tiers=tuple(tiers)))


def _spine(inputs: Inputs) -> int:
    return pools_meet(inputs.cluster, topology_of(inputs.cluster, inputs.gpu))
