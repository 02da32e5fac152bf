"""Lengths of requests: distributions, and rows that were counted, as draws and as quantiles."""

from __future__ import annotations

import heapq
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.workload import MOST_ROWS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.specs.workload import LengthRow, Lengths, RequestClass

    Whole = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Pair = tuple[Whole, Whole]
    FloatPair = tuple[Floats, Floats]

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it fill the interval from 0 to 1 as evenly as those of any number do."""

STARTS = 64  # first levels that are tried: the one whose pairs fit best is taken
FEW_ROWS = 128  # rows that are tried first

MOST_LOST = 0.01
"""Relative error of a mean or a 99th percentile that rows may have; half of what is promised."""


def sample_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> Whole:
    """Draw *count* lengths, each at least 1, shape (count,)."""
    if lengths.distribution == "fixed":
        return np.full(count, lengths.mean, dtype=np.int64)
    if lengths.distribution == "uniform":
        return rng.integers(lengths.low or 1, lengths.max_tokens, size=count, endpoint=True)
    drawn = (lengths.median or 1) * np.exp((lengths.sigma or 0) * rng.standard_normal(count))
    return np.clip(np.rint(drawn), 1, lengths.max_tokens).astype(np.int64)


def sample_requests(
    part: RequestClass, count: int, prompts: np.random.Generator, answers: np.random.Generator
) -> Pair:
    """
    Draw prompts and answers of *count* requests, shape (count,) each.

    Of `lengths` both come from one row, drawn by *prompts*; else they are independent.
    """
    if part.input_tokens is not None and part.output_tokens is not None:
        return (
            sample_lengths(part.input_tokens, count, prompts),
            sample_lengths(part.output_tokens, count, answers),
        )
    rows = np.array(part.lengths, dtype=np.int64)
    drawn = rows[prompts.choice(len(rows), size=count, p=rows[:, 2] / rows[:, 2].sum())]
    return drawn[:, 0], drawn[:, 1]


def length_quantiles(lengths: Lengths, count: int) -> Floats:
    """
    Return *count* equally likely lengths: the quantiles at (k + 1/2) / count, shape (count,).

    Closed forms average over these lengths instead of drawing random ones.
    """
    levels = (np.arange(count) + 0.5) / count
    if lengths.distribution == "fixed":
        return np.full(count, float(lengths.mean or 0))
    if lengths.distribution == "uniform":
        low, high = lengths.low or 1, lengths.max_tokens
        return np.floor(low + levels * (high - low + 1))
    normal = np.array([NormalDist().inv_cdf(level) for level in levels])
    drawn = (lengths.median or 1) * np.exp((lengths.sigma or 0) * normal)
    return np.clip(np.rint(drawn), 1, lengths.max_tokens)


def request_quantiles(part: RequestClass, count: int) -> FloatPair:
    """
    Return prompts and answers of *count* equally likely requests, shape (count,) each.

    Prompts ascend. Of `lengths`, each answer belongs to the prompt beside it, and both have the
    means of the rows; else answers are quantiles of their own distribution, ascending, too.
    """
    if part.input_tokens is not None and part.output_tokens is not None:
        prompts, answers = (part.input_tokens, part.output_tokens)
        return length_quantiles(prompts, count), length_quantiles(answers, count)
    return _row_quantiles(part.lengths, count)


@lru_cache(maxsize=64)
def _row_quantiles(lengths: tuple[LengthRow, ...], count: int) -> FloatPair:
    """
    Return prompts and answers of *count* equally likely requests of counted lengths.

    Each prompt is the mean of a group of requests, in order of their prompts, and so is each
    answer. Which answer belongs to a prompt is drawn from its own group, at levels that fill the
    interval evenly over the groups, and from where their product has the mean of the rows' most
    nearly: independent lengths stay independent, and correlated ones correlated.
    """
    rows = np.array(sorted(lengths), dtype=np.float64)
    prompts, answers, weights = rows.T
    levels = _levels(count)
    own = _answers_of_groups(answers, weights, levels)
    prompts_of, answers_of = (
        _group_means(lengths_of, weights, count) for lengths_of in (prompts, answers)
    )
    together = float(np.average(prompts * answers, weights=weights))
    return prompts_of, _paired(prompts_of, answers_of, own, together)


def _levels(count: int) -> Floats:
    return (np.arange(count) * GOLDEN + np.linspace(0, 1, STARTS)[:, None]) % 1.0


def _paired(prompts: Floats, answers: Floats, own: Floats, together: float) -> Floats:
    """Return ascending answers in that order of one row of *own*, (m, n), nearest to a product."""
    # Equal answers are told apart by the level, so that no order of rows shows in them.
    places = np.lexsort((_levels(len(prompts)), own), axis=1).argsort(axis=1)
    products = answers[places] @ prompts / len(prompts)
    paired: Floats = answers[places[np.abs(products - together).argmin()]]
    return paired


def _group_means(values: Floats, weights: Floats, count: int) -> Floats:
    order = np.argsort(values, kind="stable")
    reached = np.concatenate([[0.0], np.cumsum(weights[order])])
    total = np.concatenate([[0.0], np.cumsum(weights[order] * values[order])])
    borders = np.linspace(0.0, reached[-1], count + 1)
    means: Floats = np.diff(np.interp(borders, reached, total)) * count / reached[-1]
    return means


def _answers_of_groups(answers: Floats, weights: Floats, levels: Floats) -> Floats:
    """
    Return quantiles of the answers in each of n groups of rows that have equal weight, (m, n).

    *answers* and *weights* are of rows in order of their prompts; a border may cut a weight.
    """
    count = levels.shape[1]
    borders = np.linspace(0.0, weights.sum(), count + 1)
    reached = np.cumsum(weights)
    first = np.searchsorted(reached, borders[:-1], side="right")
    last = np.minimum(np.searchsorted(reached, borders[1:], side="left"), len(answers) - 1)
    quantiles = np.empty(levels.shape)
    for at, (low, high) in enumerate(zip(first, last, strict=True)):
        ends = np.minimum(reached[low : high + 1], borders[at + 1])
        inside = np.diff(np.concatenate([[borders[at]], ends]))
        order = np.argsort(answers[low : high + 1], kind="stable")
        share = np.cumsum(inside[order])
        chosen = np.searchsorted(share, levels[:, at] * share[-1], side="right")
        quantiles[:, at] = answers[low + order[np.minimum(chosen, len(order) - 1)]]
    return quantiles


def independent_rows(prompts: Floats, answers: Floats, count: int) -> tuple[LengthRow, ...]:
    """
    Return *count* rows of one request each, of lengths whose dependence is not known.

    *prompts* and *answers* are equally likely lengths, any number of them.
    """
    prompts_of, answers_of = (
        np.maximum(1, np.rint(_group_means(tokens, np.ones(len(tokens)), count)))
        for tokens in (prompts, answers)
    )
    together = prompts_of.mean() * answers_of.mean()
    paired = _paired(prompts_of, answers_of, np.zeros((STARTS, count)), together)
    return tuple((int(n), int(o), 1) for n, o in zip(prompts_of, paired, strict=True))


def length_rows(prompts: Whole, answers: Whole, *, place: str) -> tuple[LengthRow, ...]:
    """
    Count requests by their lengths, in as many rows as keep means and 99th percentiles.

    The requests are split in two again and again, each time the group whose lengths differ most
    from their means; a row is a group's mean lengths and its number of requests. The longest
    prompt, the longest answer and the longest request are rows of their own.

    Args:
        prompts, answers: tokens of each request, shape (n,).
        place: where they come from, named in errors.

    Raises InputError: `MOST_ROWS` rows err by more than `MOST_LOST`.
    """
    lengths = np.column_stack([prompts, answers]).astype(np.int64)
    most = FEW_ROWS
    while most <= MOST_ROWS:
        rows = _rows(lengths, most)
        if _lost(lengths, np.array(rows)) <= MOST_LOST:
            return rows
        most *= 2
    expected = f"lengths that {MOST_ROWS:,} rows tell to {MOST_LOST:.0%} of mean and p99"
    raise InputError(place, f"{len(lengths):,} requests", expected, "simulate the trace itself")


def _rows(lengths: Whole, most: int) -> tuple[LengthRow, ...]:
    """Split requests into at most *most* groups; return mean lengths and number of each."""
    longest = {int(np.argmax(column)) for column in (*lengths.T, lengths.sum(axis=1))}
    others = np.delete(lengths, list(longest), axis=0)
    scale = lengths.mean(axis=0)
    groups = [_group(others, scale, 0)] if len(others) else []
    number = 1
    while len(groups) + len(longest) < most and groups and groups[0][0] < 0:
        _, _, widest, group = heapq.heappop(groups)
        middle = np.median(group[:, widest])
        low = group[:, widest] <= middle
        if low.all():
            low = group[:, widest] < middle
        for half in (group[low], group[~low]):
            heapq.heappush(groups, _group(half, scale, number))
            number += 1
    counted: dict[tuple[int, int], int] = {}
    for group in (*(group for *_, group in groups), *(lengths[[at]] for at in longest)):
        prompt, answer = np.rint(group.mean(axis=0)).astype(int).tolist()
        counted[prompt, answer] = counted.get((prompt, answer), 0) + len(group)
    return tuple((prompt, answer, count) for (prompt, answer), count in sorted(counted.items()))


def _group(lengths: Whole, scale: Floats, number: int) -> tuple[float, int, int, Whole]:
    """Return a group with the spread that a split would lessen, and the column that has it."""
    spread = ((lengths - lengths.mean(axis=0)) / scale) ** 2
    # Of equal lengths, rounding leaves a spread that no split lessens.
    by_column = spread.sum(axis=0) * (np.ptp(lengths, axis=0) > 0)
    widest = int(np.argmax(by_column))
    return -float(by_column[widest]), number, widest, lengths


def _lost(lengths: Whole, rows: Whole) -> float:
    """Return the largest relative error of a mean or a 99th percentile of either length."""
    kept = np.repeat(rows[:, :2], rows[:, 2], axis=0)
    return max(
        float(np.abs(of(kept, axis=0) / of(lengths, axis=0) - 1).max())
        for of in (np.mean, lambda values, axis: np.quantile(values, 0.99, axis=axis))
    )
