"""Failures of a job: how often, how often to save, what is left of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.checks import not_negative, positive

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def job_mtbf_s(part_mtbf_s: ArrayLike, parts: ArrayLike) -> NDArray[np.float64]:
    """
    Mean time between failures of a job that every part stops.

        M = m / n      (docs/model.md, eq. U1)

    Args:
        part_mtbf_s: m, of one part (GPU, node, switch).
        parts: n of them.

    Returns:
        Seconds, broadcast.

    Source:
        Sum of n Poisson processes. Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected
        interruptions in 54 days on 16,384 GPUs.

    Ignores:
        Infant mortality, wear, failures that come together.

    """
    return np.asarray(np.asarray(part_mtbf_s, np.float64) / np.asarray(parts))


def checkpoint_interval_s(
    checkpoint_s: ArrayLike, mtbf_s: ArrayLike, *, first_order: bool = False
) -> NDArray[np.float64]:
    """
    Compute time between two checkpoints that loses least.

        Young: sqrt(2 C M); Daly: sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/(18 M)) - C, M where C > 2 M
        (docs/model.md, eq. U2)

    Args:
        checkpoint_s: C, that a checkpoint stops the job.
        mtbf_s: M, of the job.
        first_order: Young's, else Daly's.

    Returns:
        Seconds, broadcast.

    Source:
        Young (CACM 17, 1974); Daly (FGCS 22, 2006), eq. 37.

    Ignores:
        Checkpoints written in the background, other than by a small C.

    """
    c, m = np.asarray(checkpoint_s, np.float64), np.asarray(mtbf_s, np.float64)
    young = np.sqrt(2 * c * m)
    if first_order:
        return np.asarray(young)
    daly = young * (1 + np.sqrt(c / (2 * m)) / 3 + c / (18 * m)) - c
    return np.asarray(np.where(c < 2 * m, daly, m))


def effective_fraction(
    mtbf_s: ArrayLike, *, interval_s: ArrayLike, checkpoint_s: ArrayLike, restart_s: ArrayLike
) -> NDArray[np.float64]:
    """
    Share of the wall clock that a job makes progress.

        E = τ / (M e^(R/M) (e^((τ + C)/M) - 1))      (docs/model.md, eq. U3)

    Args:
        mtbf_s: M, of the job.
        interval_s: τ, compute time between checkpoints.
        checkpoint_s: C, that each stops the job.
        restart_s: R, from a failure until the last checkpoint runs again.

    Returns:
        A fraction, broadcast.

    Raises:
        InputError: times that are not positive (R and C may be zero).

    Source:
        Daly (FGCS 22, 2006), eq. 20: exponential failures, also during checkpoints and restarts.

    Ignores:
        Failures that need a spare while none is free: `spares`.

    """
    m, tau, c, r = (
        np.asarray(x, np.float64) for x in (mtbf_s, interval_s, checkpoint_s, restart_s)
    )
    positive(mtbf_s=float(m.min()), interval_s=float(tau.min()))
    not_negative(checkpoint_s=float(c.min()), restart_s=float(r.min()))
    return np.asarray(tau / (m * np.exp(r / m) * np.expm1((tau + c) / m)))
