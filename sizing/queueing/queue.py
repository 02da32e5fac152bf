"""Waiting times behind one server, and behind one queue for many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sizing.queueing.spread import WEIGHTS, LatencyQuantiles, spread

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRID = 1 << 13
"""Points of the discretised waiting time."""

TAIL = 18.0
"""The grid ends where about e^-18 of the waiting time is left."""


def single_server_wait(service: LatencyQuantiles, utilisation: float) -> LatencyQuantiles:
    """
    Wait in M/G/1, first come first served, exact up to the grid.

        W = sum of K residual services, P(K = k) = (1 - rho) rho^k      (docs/model.md, eq. T1)

    Args:
        service: distribution of the service time.
        utilisation: rho, below 1.

    Returns:
        Distribution of the time before service starts.

    Source:
        Pollaczek and Khinchine; the geometric sum is one division of transforms.

    Ignores:
        Nothing of M/G/1; the grid rounds times to a few thousandths of the largest wait.

    """
    if utilisation <= 0:
        return service.scaled(0.0)
    times, mass = _wait_mass(service, utilisation)
    return spread(times, mass)


def pooled_wait(service: LatencyQuantiles, utilisation: float, servers: int) -> LatencyQuantiles:
    """
    Wait in M/G/c behind one common queue, approximately.

        P(W > t) = C(c, rho) P(W_1 > t | W_1 > 0), W_1: M/G/1 with service S / c
        (docs/model.md, eq. T2)

    Args:
        service: distribution of the service time S.
        utilisation: rho, below 1, of each server.
        servers: c.

    Returns:
        Distribution of the time before service starts.

    Source:
        Erlang's C for the chance to wait (insensitive to better than a few percent); while all
        servers are busy they empty the queue like one server c times as fast (Lee and Longton).

    Ignores:
        That services are not exponential in C; exact for M/M/c and for c = 1.

    """
    if utilisation <= 0:
        return service.scaled(0.0)
    times, mass = _wait_mass(service.scaled(1 / servers), utilisation)
    waiting = mass.copy()
    waiting[0] = max(0.0, waiting[0] - (1 - utilisation))
    chance = erlang_c(servers, utilisation)
    waiting *= chance / waiting.sum()
    waiting[0] += 1 - chance
    return spread(times, waiting)


def erlang_c(servers: int, utilisation: float) -> float:
    """
    Chance to wait in M/M/c.

        C = B / (1 - rho (1 - B)),  B_0 = 1,  B_n = a B_(n-1) / (n + a B_(n-1)),  a = c rho
        (docs/model.md, eq. T2)
    """
    offered = servers * utilisation
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - utilisation * (1 - blocked))


def _wait_mass(
    service: LatencyQuantiles, utilisation: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return grid of times and probability at each, by eq. T1."""
    mean = service.mean
    second = float(service.values**2 @ WEIGHTS)
    mean_wait = utilisation * second / (2 * mean * (1 - utilisation))
    end = TAIL * mean_wait / utilisation + 2 * float(service.values[-1])
    step = end / GRID
    edges = np.asarray((np.arange(GRID) + 0.5) * step, dtype=np.float64)
    residual = np.diff(_residual_cdf(service, edges), prepend=0.0)
    transform = np.fft.rfft(residual)
    mass = np.fft.irfft((1 - utilisation) / (1 - utilisation * transform), GRID)
    return np.asarray(edges - step / 2), np.asarray(np.maximum(mass, 0.0))


def _residual_cdf(service: LatencyQuantiles, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chance that a service in progress ends within *times*: E[min(S, t)] / E[S]."""
    below = np.concatenate([[0.0], np.cumsum(WEIGHTS * service.values)])
    share = np.concatenate([[0.0], np.cumsum(WEIGHTS)])
    index = np.searchsorted(service.values, times)
    return np.asarray((below[index] + times * (1 - share[index])) / below[-1])
