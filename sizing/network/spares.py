"""Failures of a job and the checkpoints against them; spares that reach an availability."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import numpy as np

from minicluster.errors import InputError
from minicluster.specs.checks import positive

MOST_SPARES = 100_000
"""Spares tried before the answer is that no number of them is enough."""


def checkpoint_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """
    Compute time between two checkpoints that loses least.

        sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/(18 M)) - C, M where C > 2 M
        (docs/model.md, eq. U2)

    C stops the job for a checkpoint, M is its mean time between failures.

    Source:
        Daly (FGCS 22, 2006), eq. 37; its first term is Young's (CACM 17, 1974).

    Ignores:
        Checkpoints written in the background, other than by a small C.
    """
    c, m = checkpoint_s, mtbf_s
    if c >= 2 * m:
        return m
    return math.sqrt(2 * c * m) * (1 + math.sqrt(c / (2 * m)) / 3 + c / (18 * m)) - c


def effective_fraction(
    mtbf_s: float, *, interval_s: float, checkpoint_s: float, restart_s: float
) -> float:
    """
    Share of the wall clock that a job makes progress.

        E = τ / (M e^(R/M) (e^((τ + C)/M) - 1))      (docs/model.md, eq. U3)

    Args:
        mtbf_s: M, of the job.
        interval_s: τ, compute time between checkpoints.
        checkpoint_s: C, that each stops the job.
        restart_s: R, from a failure until the last checkpoint runs again.

    Source:
        Daly (FGCS 22, 2006), eq. 20: exponential failures, also during checkpoints and restarts.

    Ignores:
        Failures that need a spare while none is free: `spares`.
    """
    wasted = math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    return interval_s / (mtbf_s * wasted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spares:
    """
    Spares of one kind of part.

    Attributes:
        availability: share of the time in which at least *needed* work.
        without: the same without any spare.
        failures_in_repair: mean number of parts under repair.
    """

    needed: int
    spares: int
    availability: float
    without: float
    failures_in_repair: float


def spares(
    needed: int, *, mtbf_s: float, repair_s: float, availability: float, crews: int | None = None
) -> Spares:
    """
    Return the fewest spares that keep *needed* parts working.

        A(s) = P(at most s of N + s parts are down) ≥ A      (docs/model.md, eq. U4)

    Args:
        needed: N parts (GPUs, nodes, replicas, switches).
        mtbf_s: mean time between failures of one part; a replica of g GPUs has 1/g of a GPU's.
        repair_s: until a failed one works again.
        availability: A, below 1.
        crews: repairs at a time; `None`: as many as there are failures.

    Raises:
        InputError: an availability that is not between 0 and 1, times or counts that are not
            positive, or failures that come faster than the crews repair.

    Source:
        Machine-repair model: birth and death with all parts powered; with a crew for each failure
        the binomial distribution, for many parts the Poisson one.

    Ignores:
        Failures that take several parts at once: count the failure domain as the part.
    """
    positive(needed=needed, mtbf_s=mtbf_s, repair_s=repair_s, crews=crews)
    if not 0 < availability < 1:
        raise InputError("availability", availability, "between 0 and 1", "0.999 is three nines")
    ratio = repair_s / mtbf_s
    if crews is not None and needed * ratio >= crews:
        raise InputError(
            "crews", crews, f"more than {needed * ratio:.3g}: failures per repair time",
            "more crews, faster repair or fewer parts",
        )  # fmt: skip
    reached = partial(availability_of, needed, ratio=ratio, crews=crews)
    fewest = bisect_left(range(MOST_SPARES), availability, key=reached)
    if fewest == MOST_SPARES:
        raise InputError(
            "availability", availability, "a lower availability: no number of spares reaches it"
        )
    down = distribution(needed + fewest, ratio=ratio, crews=crews)
    return Spares(
        needed=needed,
        spares=fewest,
        availability=reached(fewest),
        without=reached(0),
        failures_in_repair=float(np.arange(len(down)) @ down),
    )


def availability_of(needed: int, spare: int, *, ratio: float, crews: int | None = None) -> float:
    """Return A(s) of eq. U4: the share of time in which at most *spare* parts are down."""
    return float(
        min(1.0, distribution(needed + spare, ratio=ratio, crews=crews)[: spare + 1].sum())
    )


def distribution(parts: int, *, ratio: float, crews: int | None = None) -> np.ndarray:
    """
    Probabilities of 0 to *parts* parts being down.

        p_(k+1) / p_k = (n - k) r / min(k + 1, c), r = repair / MTBF      (docs/model.md, eq. U5)

    n parts, all powered; c crews, unlimited where `None`: p is then binomial, q = r / (1 + r).

    Source:
        Balance equations of a birth and death process.

    Ignores:
        Spares that do not fail while they wait.
    """
    k = np.arange(parts)
    repairing = k + 1 if crews is None else np.minimum(k + 1, crews)
    log = np.concatenate(([0.0], np.cumsum(np.log((parts - k) * ratio / repairing))))
    weights = np.exp(log - log.max())
    return np.asarray(weights / weights.sum())
