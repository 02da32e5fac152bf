"""The prefill pool: service, wait, utilisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.plan import step_time
from minicluster.routing import LEAST_TOKENS, POWER_OF_TWO
from sizing.queueing.least_tokens import least_tokens_wait
from sizing.queueing.spread import LatencyQuantiles, spread
from sizing.queueing.two_choices import two_choices_wait

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sizing.queueing.stage import TandemLoad

CLOSED_FORMS = (LEAST_TOKENS, POWER_OF_TWO, "random")
"""Routing policies with a wait of their own here; of others, the wait is that of `random`."""

LOWER_LOADS = np.linspace(0.05, 1, 20)
"""Shares of the load that eq. T14 looks back over."""


def service_s(tandem: TandemLoad) -> NDArray[np.float64]:
    """
    Seconds to prefill each of the tandem's prompts alone, the other pool idle.

        S = t(n) + (ceil(n / budget) - 1) base      (docs/model.md, eq. T5)
    """
    n = tandem.computed_tokens
    step = tandem.step_model.prefill
    chunks = np.ceil(n / tandem.prefill.max_batched_tokens)
    alone = step_time.prefill_s(step, n, tandem.workload.prefix_tokens)
    return np.asarray(alone + (chunks - 1) * step.base_s)


def batch_s(tandem: TandemLoad, prompts: float) -> float:
    """
    Mean seconds of a step that prefills several prompts together.

        t(b) = base + experts (1 - q^(b n)) + max(stream, a b n) + c b pairs
        (docs/model.md, eq. T6)
    """
    step = tandem.step_model.prefill
    n = tandem.computed_tokens
    mean = float(n.mean())
    alone = float(service_s(tandem).mean())
    linear = float(np.maximum(step.stream_s, step.per_prefill_token_s * n).mean())
    once = float(step_time.fixed_s(step, n).mean()) + linear
    filled = max(linear, step.per_prefill_token_s * mean * prompts)
    shared = float(step_time.fixed_s(step, n * prompts).mean()) + filled
    return shared + prompts * (alone - once)


def utilisation(tandem: TandemLoad, slowdown: float = 1.0) -> float:
    """Return the share of the pool's capacity in use, every batch filled if need be (eq. T6)."""
    b = tandem.prefill.max_batch_size
    per_replica = tandem.prefill_requests_per_s / tandem.prefill.replicas
    return per_replica * slowdown * batch_s(tandem, b) / b


def busy_fraction(tandem: TandemLoad, slowdown: float = 1.0) -> float:
    """Return the share of the time in which a replica computes."""
    per_replica = tandem.prefill_requests_per_s / tandem.prefill.replicas
    return min(1.0, per_replica * slowdown * batch_s(tandem, 1))


def wait(tandem: TandemLoad, slowdown: float = 1.0) -> LatencyQuantiles:
    """
    Wait for prefill to start.

    One prompt at a time: M/G/1, two choices, or least tokens (eq. T1, T3, T16). In batches
    (docs/model.md, eq. T6): the queue of a server whose service is a full batch's share, and what
    is left of the batch in progress beyond what its prompts would take of that server.
    """
    b = tandem.prefill.max_batch_size
    alone = service_s(tandem) * slowdown
    used = utilisation(tandem, slowdown)
    if b == 1:
        return _routed_wait(tandem, spread(alone), used)
    share = batch_s(tandem, b) / b
    queued = _routed_wait(tandem, spread(alone).scaled(share / batch_s(tandem, 1)), used)
    size = filled(tandem, slowdown)
    beyond = slowdown * max(0.0, batch_s(tandem, size) - size * share)
    busy = busy_fraction(tandem, slowdown)
    points = (np.arange(64) + 0.5) / 64 * beyond
    left = spread(np.append(points, 0.0), np.append(np.full(64, busy / 64), 1 - busy))
    return queued.plus(left)


def _routed_wait(tandem: TandemLoad, service: LatencyQuantiles, used: float) -> LatencyQuantiles:
    """
    Wait behind the tandem's policy.

    A policy that is not in `CLOSED_FORMS` is taken as a random choice, a queue for each replica,
    which lies above the truth for policies that spread requests more evenly.
    """
    replicas = tandem.prefill.replicas
    if replicas > 1 and tandem.prefill_policy == LEAST_TOKENS:
        return least_tokens_wait(service, used, replicas)
    compared = replicas if tandem.prefill_policy == POWER_OF_TWO else 1
    return two_choices_wait(service, used, compared)


def filled(tandem: TandemLoad, slowdown: float = 1.0) -> float:
    """
    Return the mean batch: those who arrive during a batch make the next one.

        b = lambda t(b), between 1 and the limit      (docs/model.md, eq. T6)
    """
    per_replica = tandem.prefill_requests_per_s / tandem.prefill.replicas
    size = 1.0
    if tandem.prefill.max_batch_size == 1:
        return size
    for _ in range(200):
        arrived = per_replica * slowdown * batch_s(tandem, size)
        size = min(max(1.0, arrived), float(tandem.prefill.max_batch_size))
    return size


def dispersion(tandem: TandemLoad, window_s: float, slowdown: float = 1.0) -> float:
    """
    Variance over mean of how many prompts leave the pool within a window; Poisson has 1.

        z = max over x <= 1 of x z(x rho),
        z(rho) = 1 - (1 - rho^2 c_s^2 - (1 - rho^2)) tau / (tau + T),  tau = E[S] / (1 - rho)^2
        (docs/model.md, eq. T14)

    Args:
        tandem: load and pool.
        window_s: T.
        slowdown: factor on the service time S.

    Returns:
        z, between 0 and 1 for services that vary less than exponential ones. The maximum keeps
        it from falling faster than the load grows, so that more load never looks like less.

    Source:
        A busy server spaces its departures like its services (Marshall's formula, as in Whitt's
        Queueing Network Analyzer); over windows longer than the queue's relaxation time tau,
        what leaves is what came.

    Ignores:
        That departures of several replicas mix.

    """
    service = service_s(tandem) * slowdown
    mean = float(service.mean())
    share = LOWER_LOADS
    rho = share * min(utilisation(tandem, slowdown), 1.0)
    spaced = rho**2 * float(service.var()) / mean**2 + (1 - rho**2)
    relaxation = mean / np.maximum(1 - rho, 1e-6) ** 2
    return float(np.max(share * (1 - (1 - spaced) * relaxation / (relaxation + window_s))))
