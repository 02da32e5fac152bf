"""Percentiles of a tandem: both pools, what couples them, and what a request adds up to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import step_time
from minicluster.specs.step import DELAYS_PER_REQUEST
from sizing.queueing import decode, prefill
from sizing.queueing.spread import (
    PAIRS,
    STANDARD_NORMAL,
    WEIGHTS,
    LatencyQuantiles,
    poisson,
    spread,
)
from sizing.queueing.stage import QUANTILES

if TYPE_CHECKING:
    from collections.abc import Callable

    from sizing.queueing.decode import DecodeOccupancy
    from sizing.queueing.stage import TandemLoad

ROUNDS = 40
"""Iterations of the fixed point of the two pools' busy shares; it converges geometrically."""

BEFORE_DECODE = ("request overhead", "prefill queue", "prefill", "interference of decode")
"""Phases in which a request counts at its decode replica without being in its batch."""

OUTPUT_POINTS = 16
"""Output lengths over which the pace of requests is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """
    How the pools slow each other down.

    Attributes:
        prefill_busy: share of the time in which a prefill replica computes.
        decode_busy: the same of a decode replica.
        prefill_slowdown: factor on prefill times.
        decode_slowdown: factor on decode steps.
        decode_held_up: the part of it that comes from requests that join, a factor too.
    """

    prefill_busy: float
    decode_busy: float
    prefill_slowdown: float
    decode_slowdown: float
    decode_held_up: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TandemForecast:
    """
    What a load meets.

    Attributes:
        gaps: between the tokens of an answer.
        parts_s: mean TTFT by phase, in the order in which a request passes them.
        mean_batch: sequences in a decode step, as a token meets it.
        coupling: what the pools do to each other.
    """

    ttft: LatencyQuantiles
    tpot: LatencyQuantiles
    itl: LatencyQuantiles
    gaps: LatencyQuantiles
    parts_s: dict[str, float]
    mean_batch: float
    coupling: Coupling

    @property
    def e2e(self) -> LatencyQuantiles:
        """From arrival to the last token; a search that asks thousands of times needs it not."""
        rest = spread(np.multiply.outer(self.tpot.values, self.gaps.values), PAIRS)
        return self.ttft.plus(rest)


def couple(tandem: TandemLoad) -> Coupling | None:
    """
    Find the busy shares at which both pools agree, or `None` where one of them is overloaded.

        t_p = t_p,alone (1 + f_p + L_d g_p) + h_p,
        t_d = t_d,alone (1 + u_p f_d) + h_d x requests that join per step
        (docs/model.md, eq. T12; what the decode pool loses to prompts of its own: T15)

    Args:
        tandem: load, pools, interference f, g and h.

    Returns:
        The smallest fixed point, reached from idle pools.

    Source:
        `serving measure` times each pool with the other one idle and busy all the time.

    Ignores:
        Which of the other pool's replicas shares the machine with which.

    """
    fractions = tandem.step_model.interference
    alone_s = float(prefill.service_s(tandem).mean())
    slow_prefill = slow_decode = 1.0
    busy_prefill = busy_decode = 0.0
    held_up = 1.0
    for _ in range(ROUNDS):
        if max(utilisations(tandem, slow_prefill, slow_decode).values()) >= 1:
            return None
        busy_prefill = prefill.busy_fraction(tandem, slow_prefill)
        held = decode.occupancy(tandem, slow_decode)
        busy_decode = decode.busy_fraction(tandem, held)
        before = (slow_prefill, slow_decode)
        slow_prefill = (
            1
            + fractions.prefill_fraction
            + decode.mean_sequences(tandem, held) * fractions.prefill_per_sequence_fraction
            + fractions.prefill_per_request_s / alone_s
        )
        joining = tandem.workload.requests_per_s / tandem.decode.replicas
        lost = fractions.decode_per_request_s * joining / busy_decode
        lost += tandem.local_busy_fraction
        if lost >= 1:
            return None
        held_up = 1 / (1 - lost)
        slow_decode = (1 + busy_prefill * fractions.decode_fraction) * held_up
        if np.allclose(before, (slow_prefill, slow_decode), rtol=1e-9):
            break
    return Coupling(
        prefill_busy=busy_prefill,
        decode_busy=busy_decode,
        prefill_slowdown=slow_prefill,
        decode_slowdown=slow_decode,
        decode_held_up=held_up,
    )


def utilisations(
    tandem: TandemLoad, prefill_slowdown: float, decode_slowdown: float
) -> dict[str, float]:
    """Share of each pool's capacity in use (eq. T6, T8)."""
    return {
        "prefill": prefill.utilisation(tandem, prefill_slowdown),
        "decode": decode.utilisation(tandem, decode_slowdown),
    }


def capacity_requests_per_s(tandem: TandemLoad) -> float:
    """
    Rate at which the first pool saturates: the largest one that `couple` can balance.

    Without interference and local prompts each pool's utilisation is linear in the rate, and this
    is exact at once; with them the rate is bisected.
    """
    rate = tandem.workload.requests_per_s
    alone = rate / max(utilisations(tandem, 1.0, 1.0).values())
    fractions = tandem.step_model.interference
    if not any(asdict(fractions).values()) and not tandem.local_busy_fraction:
        return alone
    low, high = 0.0, alone
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if couple(at_rate(tandem, middle)) else (low, middle)
    return low


def at_rate(tandem: TandemLoad, requests_per_s: float) -> TandemLoad:
    """Return the same pools under another rate."""
    workload = replace(tandem.workload, requests_per_s=requests_per_s)
    return replace(tandem, workload=workload)


def forecast(tandem: TandemLoad) -> TandemForecast | None:
    """
    Predict every latency, or `None` where a pool is overloaded.

    TTFT adds up in the order of the deployed system (docs/model.md, eq. T13): request overhead,
    prefill queue, prefill, KV pull, wait for a decode slot, decode step in progress, first decode
    step.
    """
    coupling = couple(tandem)
    if coupling is None:
        return None
    held = decode.occupancy(tandem, coupling.decode_slowdown)
    ttft, parts = _ttft(tandem, coupling, held)
    before_s = sum(parts[part] for part in BEFORE_DECODE)
    stay_s = float(held.sequences @ held.mass) / tandem.workload.requests_per_s
    seen = partial(
        decode.batch_seen,
        tandem,
        held,
        before_s=before_s,
        dispersion=prefill.dispersion(tandem, stay_s, coupling.prefill_slowdown),
    )
    batch = seen()
    step_s = float(decode.step_s(tandem, batch.mean)) * coupling.decode_slowdown
    return TandemForecast(
        ttft=_with_local(tandem, ttft, step_s),
        tpot=_tpot(tandem, coupling, seen),
        itl=_itl(tandem, coupling, batch),
        gaps=spread(tandem.output_tokens - 1),
        parts_s=parts,
        mean_batch=batch.mean,
        coupling=coupling,
    )


def _ttft(
    tandem: TandemLoad, coupling: Coupling, held: DecodeOccupancy
) -> tuple[LatencyQuantiles, dict[str, float]]:
    """Add up eq. T13; the parts' means add up to the mean of the sum."""
    slow, path = coupling.prefill_slowdown, tandem.step_model.path
    alone = prefill.service_s(tandem)
    in_batch = prefill.batch_s(tandem, prefill.filled(tandem, slow)) - prefill.batch_s(tandem, 1)
    pull = step_time.transfer_s(path, tandem.computed_tokens + tandem.workload.prefix_tokens)
    queued = prefill.wait(tandem, slow)
    before = path.request_s + queued.mean + (float(alone.mean()) + in_batch) * slow
    admitted = decode.admission_wait(
        tandem, held, before_s=before, slowdown=coupling.decode_slowdown
    )
    last, step = decode.first_token_wait(
        tandem, held, pull_s=float(pull.mean()), slowdown=coupling.decode_slowdown
    )
    own = spread(path.request_s + alone * slow + in_batch * slow + pull)
    ttft = own.plus(queued).plus(admitted).plus(last)
    parts = {
        "request overhead": path.request_s,
        "prefill queue": queued.mean,
        "prefill": float(alone.mean()) + in_batch,
        "interference of decode": (float(alone.mean()) + in_batch) * (slow - 1),
        "kv transfer": float(pull.mean()),
        "decode queue": admitted.mean,
        "decode step in progress": max(0.0, last.mean - step),
        "first decode step": step,
    }
    # Gathering into bins moves the mean by rounding errors only; the parts follow it exactly.
    parts["prefill queue"] = max(0.0, parts["prefill queue"] + ttft.mean - sum(parts.values()))
    return ttft, parts


def _with_local(tandem: TandemLoad, ttft: LatencyQuantiles, step_s: float) -> LatencyQuantiles:
    """Mix in prompts that decode computes: rest of a step, one more, and their own (eq. T15)."""
    local = tandem.local_s
    if not len(local):
        return ttft
    rest = np.linspace(0, step_s, len(local))
    own = tandem.step_model.path.request_s + step_s + np.add.outer(local, rest)
    share = len(local) / QUANTILES
    mass = np.full(own.size, share / own.size)
    return spread(
        np.concatenate([own.ravel(), ttft.values]), np.concatenate([mass, (1 - share) * WEIGHTS])
    )


def _tpot(
    tandem: TandemLoad, coupling: Coupling, seen: Callable[..., LatencyQuantiles]
) -> LatencyQuantiles:
    """Mean gap of a request: occupancy and interference, averaged over its stay (eq. T9)."""
    lengths = tandem.output_tokens
    groups = [group for group in np.array_split(lengths, OUTPUT_POINTS) if len(group)]
    answers = [float(group.mean()) for group in groups]
    found: list[LatencyQuantiles] = []
    for tokens in sorted(set(answers)):
        share = decode.averaged_share(tandem, tokens)
        batch = seen(averaged=share)
        steps = decode.step_spread(tandem, batch, averaged=share)
        stay = tokens * steps.mean * coupling.decode_slowdown
        found += [_slowed(tandem, coupling, steps, stay)] * answers.count(tokens)
    return spread(np.array([each.values for each in found]), np.tile(WEIGHTS, (len(found), 1)))


def _slowed(
    tandem: TandemLoad, coupling: Coupling, steps: LatencyQuantiles, stay_s: float
) -> LatencyQuantiles:
    """
    Steps slowed by the share of the stay in which the other pool computes.

    Var = u (1 - u) 2 r (1 - r (1 - e^(-1/r))), r = tau / stay,
    1 / tau = 1 / busy period + 1 / idle period      (docs/model.md, eq. T12)
    """
    fraction = tandem.step_model.interference.decode_fraction
    busy = coupling.prefill_busy
    if not fraction or not 0 < busy < 1:
        return steps.scaled(coupling.decode_slowdown)
    idle_s = tandem.prefill.replicas / tandem.prefill_requests_per_s
    busy_s = idle_s * busy / (1 - busy)
    ratio = 1 / (1 / idle_s + 1 / busy_s) / stay_s
    variance = busy * (1 - busy) * 2 * ratio * (1 - ratio * (1 - np.exp(-1 / ratio)))
    met = np.clip(busy + np.sqrt(variance) * STANDARD_NORMAL, 0, 1)
    return spread(
        np.multiply.outer(steps.values, (1 + fraction * met) * coupling.decode_held_up),
        PAIRS,
    )


def _itl(tandem: TandemLoad, coupling: Coupling, batch: LatencyQuantiles) -> LatencyQuantiles:
    """Every gap: a step is slowed whole or not at all, and held up by whole requests (eq. T12)."""
    between = tandem.step_model.interference
    alone = decode.step_spread(tandem, batch, averaged=1.0)
    steps = alone.scaled(1 / (1 - tandem.local_busy_fraction))
    busy = min(1.0, coupling.prefill_busy) if between.decode_fraction else 0.0
    if busy:
        slowed = steps.scaled(1 + between.decode_fraction)
        values = np.concatenate([steps.values, slowed.values])
        steps = spread(values, np.concatenate([WEIGHTS * (1 - busy), WEIGHTS * busy]))
    held_s = alone.mean * (1 + busy * between.decode_fraction) * coupling.decode_held_up
    held_s -= steps.mean
    if not between.decode_per_request_s or held_s <= 0:
        return steps
    return steps.plus(poisson(held_s, between.decode_per_request_s / DELAYS_PER_REQUEST))
