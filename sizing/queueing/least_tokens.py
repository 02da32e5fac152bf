"""Waiting where each prompt goes to the replica with the fewest tokens outstanding."""

from __future__ import annotations

from sizing.queueing.queue import pooled_wait
from sizing.queueing.spread import WEIGHTS, LatencyQuantiles
from sizing.queueing.two_choices import two_choices_wait

BLIND = 0.3
"""Share of eq. T16 that equal prompts leave to chance; fitted once, on 2 to 16 servers."""


def least_tokens_wait(
    service: LatencyQuantiles, utilisation: float, servers: int
) -> LatencyQuantiles:
    """
    Wait at servers with queues of their own, each prompt joining the one with the least to do.

        q(W) = (1 - w) q(W_pool) + w q(W_two),  w = 0.3 max(0, 1 - c_S^2)
        (docs/model.md, eq. T16)

    To send each prompt where the least work waits is to keep one common queue. Tokens outstanding
    do not tell how far a prompt in progress has got, and where all are alike, nothing else.

    Args:
        service: distribution of the service time, proportional to a prompt's tokens.
        utilisation: of each server, below 1.
        servers: how many, two or more.

    Returns:
        Distribution of the time before service starts.

    Source:
        Ours: the limits are eq. T2 and T3, w was fitted to an event simulation. Sojourns at p99
        are within 10 % of it for 2 to 16 servers at loads of 0.5 to 0.85, alike to lognormal
        services (tests/sizing/queueing/test_least_tokens.py).

    Ignores:
        Stale or unequal knowledge among several routers; fixed costs of a prompt.
    """
    pool = pooled_wait(service, utilisation, servers).values
    two = two_choices_wait(service, utilisation, servers).values
    spread_2 = float(((service.values - service.mean) ** 2) @ WEIGHTS) / service.mean**2
    blind = BLIND * max(0.0, 1.0 - spread_2)
    return LatencyQuantiles(values=(1 - blind) * pool + blind * two)
