"""Waiting behind power-of-two-choices routing, which is what Ray Serve does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sizing.queueing.queue import pooled_wait, single_server_wait
from sizing.queueing.spread import WEIGHTS, LatencyQuantiles, spread

CHOICES = 2
NORM = 1.7
"""How the two limits of eq. T3 join; fitted once, on simulations of 2 to 48 servers."""

SLOTS = 16
"""Time steps per mean service in the mean-field model."""

LONGEST_QUEUE = 24
RARE = 1e-12
"""Shares of queues that are left out."""

CONVERGED = 1e-10
"""Change of any share of queues between two rounds below which eq. T4 is solved."""

MOST_ROUNDS = 200

BUSIEST = 1 - 1e-9
"""Share of busy queues that counts as all of them."""

MEAN_FIELD_GRID = np.concatenate(
    [np.linspace(0.05, 0.75, 15), np.linspace(0.775, 0.975, 9), [0.99]]
)
"""Utilisations at which the mean-field model is solved; between them its quantiles are joined."""

SHAPE_ATOMS = 24
"""Atoms that stand for the service time in the mean-field model."""

Matrix = NDArray[np.float64]


def two_choices_wait(
    service: LatencyQuantiles, utilisation: float, servers: int
) -> LatencyQuantiles:
    """
    Wait at servers with queues of their own, each arrival joining the shorter of two.

        q(W) = (q(W_field)^p + q(W_pool)^p)^(1/p),  p = 1.7      (docs/model.md, eq. T3)

    Args:
        service: distribution of the service time.
        utilisation: of each server, below 1.
        servers: how many; one: M/G/1, exact.

    Returns:
        Distribution of the time before service starts.

    Source:
        Both limits are exact: many servers at a fixed load are independent queues in a mean
        field (Mitzenmacher; Bramson, Lu and Prabhakar); few servers near saturation act as one
        pool. Sojourns at p99 are within 15 % of simulation for 2 to 48 servers at loads of 0.3
        to 0.9, fixed, exponential and lognormal services:
        tests/sizing/queueing/test_two_choices.py.

    Ignores:
        Stale or unequal knowledge of queue lengths among several routers.

    """
    if servers == 1:
        return single_server_wait(service, utilisation)
    if utilisation <= 0:
        return service.scaled(0.0)
    field = _mean_field_wait(service, utilisation).values
    pool = pooled_wait(service, utilisation, servers).values
    return LatencyQuantiles(values=(field**NORM + pool**NORM) ** (1 / NORM))


def _mean_field_wait(service: LatencyQuantiles, utilisation: float) -> LatencyQuantiles:
    """Join solutions of eq. T4 at the two nearest utilisations of the grid; no wait at 0."""
    mean = service.mean
    shape = spread(service.values / mean, WEIGHTS).values
    cuts = np.linspace(0, len(shape), SHAPE_ATOMS + 1).astype(int)
    atoms = tuple(
        (float(shape[i:j] @ WEIGHTS[i:j] / WEIGHTS[i:j].sum()), float(WEIGHTS[i:j].sum()))
        for i, j in itertools.pairwise(cuts)
    )
    if np.ptp(shape) == 0:
        atoms = ((1.0, 1.0),)
    upper = int(np.searchsorted(MEAN_FIELD_GRID, utilisation))
    if upper == len(MEAN_FIELD_GRID):
        return LatencyQuantiles(values=mean * _solve(atoms, float(MEAN_FIELD_GRID[-1])))
    high = float(MEAN_FIELD_GRID[upper])
    low = float(MEAN_FIELD_GRID[upper - 1]) if upper else 0.0
    above = _solve(atoms, high)
    below = _solve(atoms, low) if upper else 0 * above
    share = (utilisation - low) / (high - low)
    return LatencyQuantiles(values=mean * ((1 - share) * below + share * above))


@lru_cache(maxsize=512)
def _solve(atoms: tuple[tuple[float, float], ...], utilisation: float) -> Matrix:
    """
    Quantiles of the wait in one of infinitely many queues, mean service 1.

        lambda_k = rho (s_k^2 - s_(k+1)^2) / (s_k - s_(k+1)),  s_k^2 = P(arrival finds >= k)
        (docs/model.md, eq. T4)

    A queue of length k sees arrivals at the rate that two choices among queues distributed as
    itself give; the distribution is found by iteration, held at s_1 = rho.
    """
    service = _on_grid(atoms)
    busy = min(utilisation * float(service @ np.arange(len(service))) / SLOTS, BUSIEST)
    powers = (CHOICES ** np.arange(LONGEST_QUEUE + 2.0) - 1) / (CHOICES - 1)
    start = busy ** np.minimum(powers, 1e4)
    length = int(np.clip((start > RARE).sum() + 2, 4, LONGEST_QUEUE))
    tail = np.append(start[: length + 1], 0.0)
    for _ in range(MOST_ROUNDS):
        queue = _queue(tail, service, utilisation)
        before, tail = tail, _as_busy(queue.tail, busy)
        if np.abs(tail - before).max() < CONVERGED:
            break
    return spread(*_wait(queue, service, utilisation)).values


def _as_busy(tail: Matrix, busy: float) -> Matrix:
    """
    Bend a tail until the share of busy queues is what the load says: s_1 = rho.

    Iterated as it is, a tail creeps near saturation, and one that has lost a length never finds it
    again.
    """
    return np.asarray(tail ** (np.log(busy) / np.log(min(float(tail[1]), BUSIEST))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queue:
    """
    One queue in the field.

    Attributes:
        tail: s_k, share of queues with at least k in them, k from 0.
        starts: distribution of the queue length, from 1, when a service starts.
        rates: arrival rate at queue length k, from 0.
        slot: births during one time step, queue lengths from 1.
        half_slot: the same for half a step.
        cycle: mean time between two starts.
    """

    tail: Matrix
    starts: Matrix
    rates: Matrix
    slot: Matrix
    half_slot: Matrix
    cycle: float


def _queue(tail: Matrix, service: Matrix, utilisation: float) -> _Queue:
    """Solve the queue whose arrival rates follow from *tail*; its own tail comes out."""
    rates = utilisation * (tail[:-1] + tail[1:])  # (s^2 - s'^2) / (s - s') for two choices
    size = len(rates) - 1
    births = np.append(rates[1:-1], 0.0)
    generator = (np.diag(births[:-1], 1) - np.diag(births)) / SLOTS
    half = np.linalg.matrix_power(np.eye(size) + generator / 64, 32)
    slot = half @ half
    during = np.zeros((size, size))
    for mass in service[:0:-1]:
        during = (during + mass * np.eye(size)) @ slot
    # A departure leaves k - 1; an empty queue starts its next service with one in it.
    chain = np.hstack([during[:, 1:], np.zeros((size, 1))])
    chain[:, 0] += during[:, 0]
    starts = _stationary(chain)
    left = starts @ during
    found = np.append(np.cumsum(left[::-1])[::-1], [0.0, 0.0])
    solved = np.sqrt(np.clip(found / found[0], 0, 1))
    return _Queue(
        tail=solved,
        starts=starts,
        rates=rates,
        slot=slot,
        half_slot=half,
        cycle=1 + float(left[0]) / float(rates[0]),
    )


def _stationary(chain: Matrix) -> Matrix:
    """
    Stationary distribution of a Markov chain by elimination without a subtraction.

    Source:
        Grassmann, Taksar and Heyman, Operations Research 33 (1985). Every entry keeps its digits,
        however rare its state: `_queue` takes the square root of tails, which would make 1e-8 of
        the 1e-16 that a general solver leaves, on every CPU another.
    """
    folded, size = chain.copy(), len(chain)
    for last in range(size - 1, 0, -1):
        folded[:last, last] /= folded[last, :last].sum()
        folded[:last, :last] += np.outer(folded[:last, last], folded[last, :last])
    shares = np.ones(size)
    for state in range(1, size):
        shares[state] = shares[:state] @ folded[:state, state]
    return np.asarray(shares / shares.sum())


def _wait(queue: _Queue, service: Matrix, utilisation: float) -> tuple[Matrix, Matrix]:
    """Times and probabilities: the rest of the service in progress, and those queued before."""
    span = len(service) - 1
    ages = np.empty((span, len(queue.starts)))
    state = queue.starts @ queue.half_slot
    for age in range(span):
        ages[age] = state
        state = state @ queue.slot
    index = np.arange(span)[:, None] + np.arange(1, span + 1)
    remaining = np.append(service, np.zeros(span))[np.minimum(index, 2 * span)]
    flow = queue.rates[1:] / SLOTS / (queue.cycle * utilisation)
    joint = (ages.T @ remaining) * flow[:, None]
    size = 1 << int(np.ceil(np.log2(span * (len(joint) + 1))))
    one = np.fft.rfft(service, size)
    total = np.zeros_like(one)
    for row in joint[::-1]:
        total = total * one + np.fft.rfft(np.append(0.0, row), size)
    mass = np.maximum(np.fft.irfft(total, size), 0.0)
    mass[0] = (1 - 1 / queue.cycle) * queue.rates[0] / utilisation
    # The age is counted at the middle of a step, so what remains is half a step less.
    return np.maximum(0.0, (np.arange(size) - 0.5) / SLOTS), mass


def _on_grid(atoms: tuple[tuple[float, float], ...]) -> Matrix:
    """Split each atom of the service time over its two neighbours on the grid, mean kept."""
    times, masses = np.array(atoms).T
    slots = times * SLOTS
    low = np.floor(slots).astype(int)
    service = np.zeros(low.max() + 2)
    np.add.at(service, low, masses * (low + 1 - slots))
    np.add.at(service, low + 1, masses * (slots - low))
    service[1] += service[0]
    service[0] = 0.0
    return service
