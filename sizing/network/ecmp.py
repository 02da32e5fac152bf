"""ECMP: a Monte Carlo estimate of how evenly hashed flows fill the uplinks of a switch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minicluster.specs.checks import Count, Options, positive

LARGEST_DRAW = 2_000_000
"""Loads that are drawn at a time: 16 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashing(Options):
    """
    Flows, and the uplinks they are hashed onto.

    Attributes:
        pairs: pairs of GPUs that send through the switch at once, each at a port's full rate.
        uplinks: equal ports that lead on.
        flows: over which one pair spreads its bytes evenly, each hashed by itself.
    """

    pairs: Count
    uplinks: Count
    flows: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Collisions:
    """
    Load of the uplinks after hashing.

    Attributes:
        imbalance_mean: the fullest uplink's load over the average one's; 1 is perfect.
        imbalance_standard_error: standard error of that mean, from the trials.
        imbalance_p50, imbalance_p99: its quantiles over the trials.
        slowest_fraction: mean share of its fair rate that the worst flow keeps: what a collective
            gets, which waits for its last message.
        throughput_fraction: share of the uplinks' rate that is used while all pairs send.
        idle_fraction: uplinks without any flow.
        idle_exact_fraction: the same by (1 - 1/U)^(pairs flows).
    """

    hashing: Hashing
    trials: int
    imbalance_mean: float
    imbalance_standard_error: float
    imbalance_p50: float
    imbalance_p99: float
    slowest_fraction: float
    throughput_fraction: float
    idle_fraction: float
    idle_exact_fraction: float


def collisions(hashing: Hashing, *, trials: int, seed: int) -> Collisions:
    """
    Draw hashes and measure the loads.

        pairs x flows balls of weight 1/flows into U equal bins      (docs/model.md, eq. Z1)

    Raises:
        InputError: a count that is not positive.

    Source:
        ECMP hashes a flow's header; NCCL's queue pairs give a pair several of them.

    Ignores:
        Hashes that correlate from one tier to the next, congestion control, paths that avoid a
        full port (adaptive routing): an upper bound of the harm.
    """
    positive(**{"--trials": trials})
    random = np.random.default_rng(seed)
    shares = np.full(hashing.uplinks, 1 / hashing.uplinks)
    mean = hashing.pairs / hashing.uplinks
    fullest, used, idle = [], [], []
    at_once = max(1, LARGEST_DRAW // hashing.uplinks)
    for start in range(0, trials, at_once):
        count = min(at_once, trials - start)
        loads = random.multinomial(hashing.pairs * hashing.flows, shares, size=count)
        weight = loads / hashing.flows
        fullest.append(weight.max(axis=1))
        used.append(np.minimum(weight, 1.0).mean(axis=1))
        idle.append((loads == 0).mean(axis=1))
    top = np.concatenate(fullest)
    imbalance = top / mean
    # A pair is fair at full rate, or at its share of the uplinks where there are too few of them.
    fair = min(1.0, 1 / mean)
    return Collisions(
        hashing=hashing,
        trials=trials,
        imbalance_mean=float(imbalance.mean()),
        imbalance_standard_error=float(imbalance.std() / math.sqrt(trials)),
        imbalance_p50=float(np.quantile(imbalance, 0.5)),
        imbalance_p99=float(np.quantile(imbalance, 0.99)),
        slowest_fraction=float((np.minimum(1.0, 1 / top) / fair).mean()),
        throughput_fraction=float(np.concatenate(used).mean() / min(1.0, mean)),
        idle_fraction=float(np.concatenate(idle).mean()),
        idle_exact_fraction=(1 - 1 / hashing.uplinks) ** (hashing.pairs * hashing.flows),
    )
