"""The load: how often requests come, and how long they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from minicluster.errors import InputError
from minicluster.specs.checks import Count, NotNegative, Positive, Spec, Whole, choice

NEEDED = {"fixed": {"mean"}, "uniform": {"low", "high"}, "lognormal": {"median", "sigma", "high"}}
"""Keys that each distribution of lengths needs; it takes no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Spec):
    """
    A distribution of token counts, each at least 1.

    `fixed`: always `mean`. `uniform`: integers from `low` to `high`, both included.
    `lognormal`: median `median`, standard deviation of the logarithm `sigma`, cut at `high`.

    Attributes:
        distribution: fixed, uniform or lognormal.
        mean: fixed: the length.
        low: uniform: the shortest.
        high: uniform and lognormal: the longest.
        median: lognormal: half of the lengths are below.
        sigma: lognormal: standard deviation of the logarithm.
    """

    distribution: Annotated[str, choice(*NEEDED)] = "fixed"
    mean: Count | None = None
    low: Count | None = None
    high: Count | None = None
    median: Positive | None = None
    sigma: NotNegative | None = None

    def _check(self) -> None:
        needed = NEEDED[self.distribution]
        for key in ("mean", "low", "high", "median", "sigma"):
            value = getattr(self, key)
            if key in needed and value is None:
                raise InputError(key, None, f"a number: lengths are {self.distribution}")
            if key not in needed and value is not None:
                raise InputError(key, value, f"no such key: lengths are {self.distribution}")
        floor = self.low if self.low is not None else self.median
        if floor is not None and self.high is not None and floor > self.high:
            raise InputError("high", self.high, f"at least {floor}")

    @classmethod
    def fixed(cls, tokens: int) -> Lengths:
        """Return the distribution that always gives *tokens*."""
        return cls(mean=tokens)

    @property
    def max_tokens(self) -> int:
        """Largest length that can occur."""
        return self.high if self.high is not None else int(self.mean or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec(Spec):
    """
    Open-loop Poisson arrivals with given lengths.

    Attributes:
        requests_per_s: mean arrival rate.
        input_tokens: prompt length, a number or a distribution.
        output_tokens: answer length, a number or a distribution.
        prefix_tokens: of the input, already in the prefix cache.
        trace: file of arrivals that replaces rate and lengths.
    """

    _TABLE: ClassVar[str] = "workload"

    requests_per_s: Positive
    input_tokens: Lengths
    output_tokens: Lengths
    prefix_tokens: Whole = 0
    trace: str | None = None

    def _check(self) -> None:
        if self.prefix_tokens >= self.input_tokens.max_tokens:
            expected = f"less than the longest input, {self.input_tokens.max_tokens}"
            raise InputError("workload.prefix_tokens", self.prefix_tokens, expected)
