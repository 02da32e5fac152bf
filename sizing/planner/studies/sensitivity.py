"""Sensitivity: the plan with one number of the scenario changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizing.planner.studies.result import StudyResult, plan_scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minicluster.plan import Inputs
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.topology import TierSpec
    from minicluster.specs.workload import Lengths, WorkloadSpec

CHANGES = (-0.5, -0.25, -0.1, 0.1, 0.25, 0.5)
"""Relative changes; of a hit rate of zero, absolute ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """
    The result with one number changed.

    Attributes:
        change_fraction: its relative change, -0.5 to 0.5.
    """

    name: str
    change_fraction: float
    value: float
    answer: StudyResult


def changed_inputs(inputs: Inputs) -> Iterator[tuple[str, float, float, Inputs]]:
    """Yield name, change, new value and inputs of every possible change."""
    for name, vary in VARIED.items():
        for change in CHANGES:
            found = vary(inputs, change)
            if found is not None:
                yield name, change, *found


def sensitivity(inputs: Inputs) -> Iterator[Changed]:
    """
    Plan anew with each of `VARIED` 10, 25 and 50 % smaller and larger, one at a time.

    Ignores:
        Changes of two numbers at once.
    """
    for name, change, value, other in changed_inputs(inputs):
        answer = plan_scenario(other, f"{name} {change:+.0%}", keep_refusals=True)
        yield Changed(name=name, change_fraction=change, value=value, answer=answer)


def _with_load(inputs: Inputs, load: WorkloadSpec) -> Inputs:
    return replace(inputs, scenario=replace(inputs.scenario, workload=load))


def _scaled(lengths: Lengths, factor: float) -> Lengths:
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


def _input_tokens(inputs: Inputs, change: float) -> tuple[float, Inputs] | None:
    """Change the prompt lengths; the share of a prompt that is cached stays."""
    load = inputs.scenario.workload
    longer = _scaled(load.input_tokens, 1 + change)
    cached = round(load.prefix_tokens * (1 + change))
    other = replace(load, input_tokens=longer, prefix_tokens=cached)
    return float(longer.max_tokens), _with_load(inputs, other)


def _output_tokens(inputs: Inputs, change: float) -> tuple[float, Inputs] | None:
    load = inputs.scenario.workload
    longer = _scaled(load.output_tokens, 1 + change)
    return float(longer.max_tokens), _with_load(inputs, replace(load, output_tokens=longer))


def _rate(inputs: Inputs, change: float) -> tuple[float, Inputs] | None:
    load = inputs.scenario.workload
    rate = load.requests_per_s * (1 + change)
    return rate, _with_load(inputs, replace(load, requests_per_s=rate))


def _hit_rate(inputs: Inputs, change: float) -> tuple[float, Inputs] | None:
    """Change the share of the longest prompt that is cached: by points where it is zero."""
    load = inputs.scenario.workload
    longest = load.input_tokens.max_tokens
    before = load.prefix_tokens / longest
    after = before * (1 + change) if before else change
    cached = round(longest * after)
    shortest = load.input_tokens.low or load.input_tokens.max_tokens
    if not 0 <= cached < min(longest, shortest):
        return None
    return after, _with_load(inputs, replace(load, prefix_tokens=cached))


def _link(inputs: Inputs, change: float) -> tuple[float, Inputs] | None:
    """Change the network beyond the HB domain: that of every GPU and of every tier."""
    cluster, factor = inputs.cluster, 1 + change
    said = cluster.scale_out_bytes_per_s
    peak = said or inputs.gpu.scale_out_bytes_per_s
    stated = [tier.one_way_bytes_per_s for tier in cluster.tiers[1:]]
    slowest = min((each for each in (peak, *stated) if each is not None), default=None)
    if slowest is None:
        return None
    tiers = (*cluster.tiers[:1], *(_faster(tier, factor) for tier in cluster.tiers[1:]))
    other = replace(cluster, scale_out_bytes_per_s=None, tiers=tiers)
    varied = replace(
        inputs,
        gpu=_with_link(inputs.gpu, said, factor),
        other_gpus=tuple(_with_link(gpu, said, factor) for gpu in inputs.other_gpus),
        cluster=other,
    )
    return slowest * factor, varied


def _with_link(gpu: GpuSpec, said: float | None, factor: float) -> GpuSpec:
    peak = said or gpu.scale_out_bytes_per_s
    return replace(gpu, scale_out_bytes_per_s=None if peak is None else peak * factor)


def _faster(tier: TierSpec, factor: float) -> TierSpec:
    before = tier.one_way_bytes_per_s
    if before is None:
        return tier
    return replace(
        tier, bytes_per_s=before * factor, gbyte_per_s=None, gbit_per_s=None, two_way=False
    )


VARIED: dict[str, Callable[[Inputs, float], tuple[float, Inputs] | None]] = {
    "input tokens": _input_tokens,
    "output tokens": _output_tokens,
    "requests/s": _rate,
    "prefix hit rate": _hit_rate,
    "link bytes/s": _link,
}
"""Functions of each number that is varied: its new value and inputs, `None` if impossible."""
