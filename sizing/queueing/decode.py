"""The decode pool: how many sequences share a step, and what that makes of a request's pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.plan import step_time
from sizing.queueing.spread import WEIGHTS, LatencyQuantiles, normal, spread

if TYPE_CHECKING:
    from sizing.queueing.stage import TandemLoad

BALANCE = 1.25
"""Deviation of one replica's sequences from the pool's mean under two choices (eq. T9)."""

REMAINDER = 1e-9
"""Probability beyond which states of the pool are left out."""

MOST_STATES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOccupancy:
    """
    Sequences in the decode pool.

    Attributes:
        sequences: states, all replicas together, those that wait for a slot included.
        mass: probability of each.
    """

    sequences: NDArray[np.float64]
    mass: NDArray[np.float64]


def step_s(
    tandem: TandemLoad, batch: NDArray[np.float64] | float, slowdown: float = 1.0
) -> NDArray[np.float64]:
    """Seconds of a decode step of mean context (eq. S3)."""
    return step_time.decode_s(tandem.step_model.decode, batch, tandem.context[0]) * slowdown


def utilisation(tandem: TandemLoad, slowdown: float = 1.0) -> float:
    """
    Share of the pool's capacity in use: its rate over that of full batches.

        u = lambda E[o] t(B_max) / (D B_max)      (docs/model.md, eq. T8)
    """
    full = float(step_s(tandem, tandem.decode.max_batch_size, slowdown))
    slots = tandem.decode.replicas * tandem.decode.max_batch_size
    return tandem.workload.requests_per_s * float(tandem.output_tokens.mean()) * full / slots


def occupancy(tandem: TandemLoad, slowdown: float = 1.0) -> DecodeOccupancy:
    """
    Distribution of the sequences in the pool.

        pi(N) ~ prod_(i <= N) lambda E[o] t(b_i) / min(i, D B_max),
        b_i = min(B_max, max(1, i / D))      (docs/model.md, eq. T8)

    Args:
        tandem: load and pool; utilisation below 1.
        slowdown: factor on the step time.

    Returns:
        States and probabilities.

    Source:
        A batch that advances all its sequences together is processor sharing with a rate that
        depends on their number; its distribution does not depend on that of the output lengths
        (Kelly, Reversibility and Stochastic Networks, chapter 3).

    Ignores:
        Imbalance between the replicas (eq. T9); that waiting for a slot is first come first
        served, which is not insensitive.

    """
    stage = tandem.decode
    slots = stage.replicas * stage.max_batch_size
    rate = tandem.workload.requests_per_s * float(tandem.output_tokens.mean())
    beyond = utilisation(tandem, slowdown)
    tail = int(min(MOST_STATES, np.ceil(np.log(REMAINDER) / np.log(min(beyond, 1 - 1e-6)))))
    i = np.arange(1, slots + tail + 1, dtype=np.float64)
    batch = np.clip(i / stage.replicas, 1, stage.max_batch_size)
    ratio = rate * step_s(tandem, batch, slowdown) / np.minimum(i, slots)
    weight = np.concatenate([[0.0], np.cumsum(np.log(ratio))])
    mass = np.exp(weight - weight.max())
    return DecodeOccupancy(sequences=np.append(0.0, i), mass=mass / mass.sum())


def busy_fraction(tandem: TandemLoad, held: DecodeOccupancy) -> float:
    """
    Share of the time in which a replica computes.

    One replica: any sequence. Several: as if the sequences were dealt out evenly.
    """
    return float(np.minimum(1.0, held.sequences / tandem.decode.replicas) @ held.mass)


def mean_sequences(tandem: TandemLoad, held: DecodeOccupancy) -> float:
    """Return the sequences of one replica, averaged over time."""
    return float(held.sequences @ held.mass) / tandem.decode.replicas


def imbalance(
    tandem: TandemLoad, held: DecodeOccupancy, *, before_s: float, averaged: float = 1.0
) -> float:
    """
    Deviation of one replica's sequences from the mean over the pool.

        sigma^2 = (1 - 1 / D) (1.25^2 + m p / (m + p)),  p = lambda TTFT / D
        (docs/model.md, eq. T9)

    The router balances requests, of which p a replica are still in prefill; those in decode are
    what is left of a balanced number.

    Args:
        tandem: load and pool.
        held: sequences in the pool, m a replica.
        before_s: time a request spends between arrival and decode.
        averaged: below 1: of the average over a stay, in which imbalance, that lasts only a few
            arrivals or a time in prefill, mostly cancels.

    Returns:
        Sequences.

    Source:
        Two choices make a replica of rank x receive 2 (1 - x) of the mean rate; balancing this
        drift with Poisson noise gives the 1.25.

    Ignores:
        Skewness.

    """
    replicas = tandem.decode.replicas
    if replicas == 1:
        return 0.0
    m = max(float(held.sequences @ held.mass) / replicas, 1e-9)
    waiting = tandem.workload.requests_per_s * before_s / replicas
    routed, thinned = BALANCE**2, m * waiting / (m + waiting)
    if averaged < 1:
        routed *= min(1.0, 2 * routed / m)
        thinned *= min(1.0, 2 * waiting / m)
    return float(np.sqrt((1 - 1 / replicas) * (routed + thinned)))


def batch_seen(
    tandem: TandemLoad,
    held: DecodeOccupancy,
    *,
    before_s: float,
    dispersion: float,
    averaged: float = 1.0,
) -> LatencyQuantiles:
    """
    Sequences in the steps that make a token, itself included.

    Tokens are made in proportion to the sequences there, so that each state counts as often as
    it has sequences. Deviations from the mean are shrunk by *dispersion*, of what the prefill
    pool lets through (docs/model.md, eq. T14), and by *averaged*, the share of the variance that
    is left when a request averages over its stay (eq. T9).
    """
    stage = tandem.decode
    inside = np.minimum(held.sequences, stage.replicas * stage.max_batch_size)
    mean = float(inside @ held.mass) / stage.replicas
    pooled = spread(inside / stage.replicas, held.mass * inside)
    middle = mean + dispersion * (pooled.mean - mean)
    values = middle + np.sqrt(dispersion * averaged) * (pooled.values - pooled.mean)
    own = normal(0.0, imbalance(tandem, held, before_s=before_s, averaged=averaged))
    values = LatencyQuantiles(values=values).plus(own).values
    return LatencyQuantiles(values=np.clip(values, 1.0, stage.max_batch_size))


def averaged_share(tandem: TandemLoad, tokens: float) -> float:
    """
    Share of the occupancy's variance left in its average over the stay of *tokens* steps.

        f(o) = 2 / o^2 int_0^o (o - t) R(t) dt,  R(t) = E[(O - t)^+] / E[O]
        (docs/model.md, eq. T9)

    R is the chance that a sequence met now is still there t steps later.
    """
    lengths = tandem.output_tokens
    upper = np.minimum(tokens, lengths)
    integral = tokens * lengths * upper - (tokens + lengths) * upper**2 / 2 + upper**3 / 3
    return float(min(1.0, 2 * np.mean(integral) / (tokens**2 * np.mean(lengths))))


def step_spread(
    tandem: TandemLoad, batch: LatencyQuantiles, *, averaged: float, slowdown: float = 1.0
) -> LatencyQuantiles:
    """Step time at a random batch, with the spread of the contexts in it (eq. T9)."""
    steps = LatencyQuantiles(values=step_s(tandem, batch.values, slowdown))
    deviation = tandem.context[1] * float(np.sqrt(averaged * batch.mean)) * slowdown
    cost = tandem.step_model.decode.per_context_token_s * deviation
    if cost < 1e-3 * steps.mean:
        return steps
    floor = float(step_s(tandem, 1.0, slowdown)) / 2
    return LatencyQuantiles(values=np.maximum(floor, steps.plus(normal(0.0, cost)).values))


def admission_wait(
    tandem: TandemLoad, held: DecodeOccupancy, *, before_s: float, slowdown: float = 1.0
) -> LatencyQuantiles:
    """
    Wait for a slot at the replica that was chosen.

        (N + 1 - B_max)^+ departures, one every t(B_max) E[o] / B_max      (docs/model.md, eq. T10)
    """
    stage = tandem.decode
    pooled = spread(held.sequences / stage.replicas, held.mass)
    here = pooled.plus(normal(0.0, imbalance(tandem, held, before_s=before_s)))
    ahead = np.maximum(0.0, here.values + 1 - stage.max_batch_size)
    full = float(step_s(tandem, stage.max_batch_size, slowdown))
    return LatencyQuantiles(
        values=ahead * full * float(tandem.output_tokens.mean()) / stage.max_batch_size
    )


def first_token_wait(
    tandem: TandemLoad, held: DecodeOccupancy, *, pull_s: float, slowdown: float = 1.0
) -> tuple[LatencyQuantiles, float]:
    """
    From the KV cache being asked for to the first token, less the pull itself.

        busy: rest of the step + t ceil(pull / t) - pull + t(B + 1);  idle: t(1)
        (docs/model.md, eq. T11)

    A pull starts with a step and is noticed at the end of one; the first token comes one decode
    step later, since the token that prefill made is not sent.

    Args:
        tandem: load and pool.
        held: sequences in the pool, as an arrival finds them.
        pull_s: mean time of the pull.
        slowdown: factor on the step time.

    Returns:
        Distribution of the whole, and the mean of its last part, the first step.

    Source:
        vLLM's scheduler and NIXL connector: loads are started and looked for once a step.

    Ignores:
        Scheduling one step ahead; that pulls of long prompts take longer.

    """
    stage = tandem.decode
    others = np.clip(held.sequences / stage.replicas, 0, stage.max_batch_size - 1)
    seen = spread(others, held.mass).values
    here = np.minimum(1.0, seen)
    current = step_s(tandem, np.maximum(1.0, seen), slowdown)
    following = step_s(tandem, seen + 1, slowdown)
    noticed = current * np.ceil(pull_s / current) - pull_s
    left = (np.arange(8) + 0.5) / 8
    busy = np.multiply.outer(left, current) + noticed + following
    alone = float(step_s(tandem, 1.0, slowdown))
    mass = np.multiply.outer(np.full(8, 1 / 8), WEIGHTS * here)
    whole = spread(np.append(busy.ravel(), alone), np.append(mass.ravel(), WEIGHTS @ (1 - here)))
    return whole, float((following * here + alone * (1 - here)) @ WEIGHTS)
