"""How tokens spread over experts: how many are touched, and how busy the busiest GPU is."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

POPULARITY_EXPONENT = 1.01
POPULARITY_RATIO = 200.0
"""
Loads of experts: density x^-1.01 from the least popular to one 200 times as popular.

Source: the sampler with which aiconfigurator times MoE kernels (collector, power_law_logits_v3:
exponent 1.01 for DeepSeek, 0.01 to 2 for small batches), read 2026-11-20.
"""


def experts_touched(
    num_experts: float, per_token: NDArray[np.float64] | float, tokens: NDArray[np.float64]
) -> NDArray[np.float64]:
    """
    Experts that a step reads, if routing is uniform and independent.

        E' = E (1 - (1 - k / E)^m)      (docs/model.md, eq. W5)

    Args:
        num_experts: E.
        per_token: k.
        tokens: m, any shape.

    Returns:
        Expected count, between k (one token) and E.

    Source:
        Occupancy: an expert stays untouched by m tokens with probability (1 - k / E)^m.

    Ignores:
        Popular experts: they make fewer of them touched, so bytes err to the high side.

    """
    return np.asarray(num_experts * (1 - (1 - per_token / num_experts) ** tokens))


def popularity_variance(exponent: float, ratio: float) -> float:
    """
    Squared coefficient of variation of the experts' loads.

        v = E[x^2] / E[x]^2 - 1,  E[x^j] = int x^(j - b) / int x^-b over [1, R]
        (docs/model.md, eq. W11)

    Args:
        exponent: b of the density x^-b; none of 1, 2 and 3.
        ratio: R, the most popular expert's load over the least popular's.

    Returns:
        v; 0 where R is 1.

    Source:
        Moments of a bounded power law.

    Ignores:
        That few experts are a small sample of it.

    """
    if ratio <= 1:
        return 0.0

    def moment(j: int) -> float:
        power = j + 1 - exponent
        return (float(ratio**power) - 1) / power

    return moment(2) * moment(0) / moment(1) ** 2 - 1


def busiest_share(
    num_experts: int, per_token: int, tokens: NDArray[np.float64], *, groups: int
) -> NDArray[np.float64]:
    """
    Rows of the busiest of *groups* groups of experts over those of the average group.

        b = 1 + z sqrt((g - 1) (v / E + 1 / (m k))),  at most g min(1, E / (g k))
        (docs/model.md, eq. W11)

    Args:
        num_experts: E, dealt out evenly and without regard to their loads.
        per_token: k.
        tokens: m of the whole stage, any shape.
        groups: g, the expert-parallel degree.

    Returns:
        1 or more, shape of *tokens*.

    Source:
        Variance of the mean of E / g of E loads drawn without return, and of m k draws; z is the
        mean largest of g normal deviates (Blom 1958: the quantile at (g - 3/8) / (g + 1/4)).

    Ignores:
        Balancers that copy popular experts (EPLB): they bring b closer to 1; the skew of real
        traffic, which is taken as aiconfigurator's.

    """
    if groups == 1:
        return np.ones_like(tokens)
    z = NormalDist().inv_cdf((groups - 0.375) / (groups + 0.25))
    v = popularity_variance(POPULARITY_EXPONENT, POPULARITY_RATIO)
    drawn = 1 / np.maximum(tokens * per_token, 1e-9)
    spread = np.sqrt((groups - 1) * (v / num_experts + drawn))
    most = groups * min(1.0, num_experts / (groups * per_token))
    return np.asarray(np.clip(1 + z * spread, 1, max(1.0, most)))
