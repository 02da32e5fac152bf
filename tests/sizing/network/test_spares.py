"""Failures and spares against closed forms and a simulation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.errors import InputError
from sizing.network.spares import (
    availability_of,
    checkpoint_interval_s,
    distribution,
    effective_fraction,
    spares,
)
from tests.sizing.conftest import Sizing

HOUR = 3600.0
GPU_MTBF_S = 54 * 24 * HOUR * 16_384 / 419
"""Llama 3 (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs."""


@given(parts=st.integers(1, 60), ratio=st.floats(1e-4, 0.5))
def test_unlimited_crews_are_binomial(parts: int, ratio: float) -> None:
    """Without a queue for repair, each part is down by itself."""
    q = ratio / (1 + ratio)
    binomial = [math.comb(parts, k) * q**k * (1 - q) ** (parts - k) for k in range(parts + 1)]
    assert distribution(parts, ratio=ratio) == pytest.approx(binomial)


@pytest.mark.parametrize("needed", [1, 7, 60, 500])
@pytest.mark.parametrize("target", [0.9, 0.99, 0.9999])
def test_spares_are_the_fewest(needed: int, target: float) -> None:
    found = spares(needed, mtbf_s=1000.0, repair_s=10.0, availability=target)
    assert found.availability >= target
    assert found.without == availability_of(needed, 0, ratio=0.01)
    down = (needed + found.spares) * 0.01 / 1.01  # mean of the binomial distribution
    assert found.failures_in_repair == pytest.approx(down)
    if found.spares:
        assert availability_of(needed, found.spares - 1, ratio=0.01) < target


def test_daly_is_the_best_interval() -> None:
    mtbf, cost = 3 * HOUR, 60.0
    best = checkpoint_interval_s(cost, mtbf)

    def left(interval_s: float) -> float:
        return effective_fraction(mtbf, interval_s=interval_s, checkpoint_s=cost, restart_s=300.0)

    assert max(left(best * factor) for factor in np.linspace(0.5, 2, 31)) <= left(best) * (1 + 1e-5)
    assert checkpoint_interval_s(2.5 * mtbf, mtbf) == mtbf
    even = math.sqrt(2) * (1 + math.sqrt(0.5) / 3 + 1 / 18) - 1
    assert checkpoint_interval_s(mtbf, mtbf) == pytest.approx(even * mtbf)


def test_effective_fraction_is_what_a_simulation_leaves() -> None:
    """Exponential failures, also during checkpoints and restarts."""
    rng = np.random.default_rng(5)
    mtbf, interval, cost, restart = 1000.0, 200.0, 20.0, 50.0
    clock = done = 0.0
    for _ in range(20_000):
        failure = rng.exponential(mtbf)
        while failure < interval + cost:
            clock += failure
            while (failure := rng.exponential(mtbf)) < restart:
                clock += failure
            clock += restart
            failure = rng.exponential(mtbf)
        clock += interval + cost
        done += interval

    expected = effective_fraction(mtbf, interval_s=interval, checkpoint_s=cost, restart_s=restart)
    assert done / clock == pytest.approx(expected, rel=0.01)


def test_command_takes_times_from_a_preset(sizing: Sizing) -> None:
    """2,048 nodes of the 24K cluster need 18 spares for three nines; a missing time is named."""
    done = sizing("spares", "2048", "--gpus-each", "8", "--cluster", "roce-24k", "--json")
    missing = sizing("spares", "2048")
    assert json.loads(done.out)["spares"] == 18, done.err
    assert (missing.code, "--mtbf-hours" in missing.err) == (2, True)


def test_fewer_crews_need_more_spares() -> None:
    counts = [
        spares(2048, mtbf_s=GPU_MTBF_S / 8, repair_s=24 * HOUR, availability=0.999, crews=crews)
        for crews in (9, 12, None)
    ]
    assert [found.spares for found in counts] == sorted((f.spares for f in counts), reverse=True)
    assert counts[0].spares > counts[-1].spares
    with pytest.raises(InputError, match="failures per repair time"):
        spares(2048, mtbf_s=GPU_MTBF_S / 8, repair_s=24 * HOUR, availability=0.9, crews=1)
    with pytest.raises(InputError, match="between 0 and 1"):
        spares(8, mtbf_s=1.0, repair_s=1.0, availability=1.0)
