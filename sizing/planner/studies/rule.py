"""A rule of thumb: GPUs by compute only."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.config import parse, read_toml
from minicluster.specs.checks import Count, Fraction, Spec
from minicluster.specs.gpu import NumberSource
from sizing.catalog.folder import find_file


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRule(Spec):
    """
    One file of `configs/presets`.

    Attributes:
        compute_fraction: of the dense peak that every GPU achieves.
        powers_of_two: whether GPUs come in powers of two only.
        most_gpus: no answer is wider.
    """

    name: str
    compute_fraction: Fraction
    powers_of_two: bool
    most_gpus: Count
    sources: tuple[NumberSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAnswer:
    """GPUs by the rule: exactly, and as they come; `None`: more than the rule goes to."""

    exact: float
    gpus: int | None


def find_rule(name: str) -> ComputeRule:
    """
    Read a rule by its name, or from a file like those of `configs/presets`.

    Raises:
        InputError: no such rule; the nearest name is said.
    """
    expectation = "a rule of configs/presets"
    path = find_file("presets", name, place="--preset", expectation=expectation)
    return parse(ComputeRule, read_toml(path), place=path.name)


def gpus_by_compute(
    rule: ComputeRule, flops: float, seconds: float, peak_flops_per_s: float
) -> RuleAnswer:
    """
    Count the GPUs whose compute does *flops* in *seconds*.

        g = F / (e P T), up to the next power of two      (docs/model.md, eq. E1)

    Args:
        rule: e.
        flops: F, of the whole prompt.
        seconds: T, the limit on TTFT.
        peak_flops_per_s: P, dense.

    Source:
        `configs/presets`.

    Ignores:
        Memory, networks, queues, kernels that achieve more or less.
    """
    exact = flops / (rule.compute_fraction * peak_flops_per_s * seconds)
    gpus = -int(-exact // 1)
    if rule.powers_of_two:
        gpus = 1 << max(0, gpus - 1).bit_length()
    return RuleAnswer(exact=exact, gpus=gpus if gpus <= rule.most_gpus else None)
