"""Pareto fronts: configurations that no other one beats in both of two respects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from sizing.planner.design_points import DesignPoint

COSTS = {"gpus": "GPUs", "usd": "US dollars a million output tokens", "watts": "W"}
WAYS_OUT = {
    "usd": "--set cluster.price_usd_per_gpu_hour=PRICE, or --set cost.prices=catalog",
    "watts": "power_w in configs/gpus",
}


def front(less: ArrayLike, also_less: ArrayLike) -> NDArray[np.bool_]:
    """
    Return which points are on the Pareto front.

    A point is beaten by one that is no worse in both respects and better in one.

    Args:
        less: better where smaller, shape (n,).
        also_less: better where smaller, shape (n,).

    Returns:
        Shape (n,); of equal points all are kept.

    Source:
        Definition; one pass over the points in the order of the first respect.
    """
    first, second = np.asarray(less, np.float64), np.asarray(also_less, np.float64)
    order = np.lexsort((second, first))
    kept = np.zeros(len(first), dtype=bool)
    best, at = np.inf, np.nan
    for point in order:
        equal = second[point] == best and first[point] == at
        if second[point] < best or equal:
            kept[point] = True
            best, at = second[point], first[point]
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """
    Design points in two respects, with their Pareto front.

    Attributes:
        name: name of the pair of respects.
        x_name: name and unit of the first respect.
        y_name: name and unit of the second respect.
        xs, ys: values of every design point, shape (n,).
        kept: which design points are on the front, shape (n,).
    """

    name: str
    x_name: str
    y_name: str
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]
    kept: NDArray[np.bool_]


def fronts(points: Sequence[DesignPoint], *, by: str = "gpus") -> tuple[Front, ...]:
    """
    Return the fronts of cost against TTFT and TPOT, and of tokens/s per GPU against per user.

    Args:
        points: configurations under one load.
        by: what it costs: `gpus`, `usd` per million output tokens, or `watts`.

    Raises:
        InputError: a number that neither catalog nor scenario has.
    """
    cost, cost_name = _cost(points, by), COSTS[by]
    ttft, tpot = (np.array([getattr(p, name) for p in points]) for name in ("ttft_s", "tpot_s"))
    per_gpu = np.array([point.tokens_per_s_per_gpu for point in points])
    per_user = np.array([point.tokens_per_s_per_user for point in points])
    pairs = (
        ("cost against TTFT", (cost_name, cost, 1), ("TTFT, s", ttft, 1)),
        ("cost against TPOT", (cost_name, cost, 1), ("TPOT, s", tpot, 1)),
        (
            "throughput against pace",
            ("output tokens/s a user", per_user, -1),
            ("output tokens/s a GPU", per_gpu, -1),
        ),
    )
    return tuple(
        Front(name=name, x_name=x[0], y_name=y[0], xs=x[1], ys=y[1],
              kept=front(x[2] * x[1], y[2] * y[1]))
        for name, x, y in pairs
    )  # fmt: skip


def _cost(points: Sequence[DesignPoint], by: str) -> NDArray[np.float64]:
    if by == "gpus":
        return np.array([float(point.gpus) for point in points])
    found = [
        point.power_w
        if by == "watts"
        else None
        if point.price_usd_per_hour is None
        else 1e6 * point.price_usd_per_hour / (3600 * point.output_tokens_per_s)
        for point in points
    ]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        raise InputError(f"--by {by}", None, "the number for every GPU", WAYS_OUT[by])
    return np.array(known)
