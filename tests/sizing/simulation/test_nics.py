"""Pulls at NICs and at the uplinks that replicas share (docs/model.md, eq. Q6 and N6)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from sizing.simulation.nics import NicQueues
from sizing.simulation.system import Path, SimulatedPool, System
from tests import plans

NIC_S = 2e-6
"""Seconds of a NIC per token."""
BASE_S = 2e-3


def system(*, uplink_s: float, prefill: int = 4, decode: int = 2, gpus: int = 1) -> System:
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=512, kv_blocks=999, block_size=16)
    pool = SimulatedPool(replicas=prefill, limits=limits, step=PlannedStep(plans.STEP), gpus=gpus)
    path = Path(transfer_base_s=BASE_S, transfer_per_token_s=NIC_S, uplink_per_token_s=uplink_s)
    return System(prefill=pool, decode=replace(pool, replicas=decode), path=path)


@given(tokens=st.integers(1, 5000), uplink_s=st.floats(0, 1e-4), gpus=st.integers(1, 8))
def test_a_pull_alone_takes_its_slowest_part(tokens: int, uplink_s: float, gpus: int) -> None:
    """That is a NIC, or the uplinks of the smaller pool; the fixed part comes after it."""
    end_s = NicQueues(system(uplink_s=uplink_s, gpus=gpus)).pull(0, 0, tokens, 1.0)
    slowest_s = max(NIC_S, uplink_s / (2 * gpus))
    assert end_s == pytest.approx(1.0 + tokens * slowest_s + BASE_S)


@given(seed=st.integers(0, 2**31), uplink_s=st.sampled_from([1e-6, 4e-6, 2e-5]))
def test_uplinks_carry_no_more_than_they_can(seed: int, uplink_s: float) -> None:
    """Pulls that are asked for at once end no sooner than all bytes have passed, or without."""
    rng = np.random.default_rng(seed)
    shared, free = NicQueues(system(uplink_s=uplink_s)), NicQueues(system(uplink_s=0.0))
    carried = 0
    for _ in range(60):
        source, target, tokens = int(rng.integers(4)), int(rng.integers(2)), int(rng.integers(900))
        end_s = shared.pull(source, target, tokens, 0.0)
        carried += tokens
        assert end_s >= carried * uplink_s / 2 - 1e-9 + BASE_S
        assert end_s >= free.pull(source, target, tokens, 0.0) - 1e-9


def test_oversubscription_costs_nothing_until_the_uplinks_are_busy() -> None:
    """At a tenth of what they carry pulls end as without; beyond it their queue only grows."""
    path_s = 8e-6  # of two decode GPUs: 4 us a token
    ends = {}
    for every_s in (0.04, 0.003):
        queues = NicQueues(system(uplink_s=path_s))
        ends[every_s] = [
            queues.pull(at % 4, at % 2, 1000, at * every_s) - at * every_s for at in range(200)
        ]
    alone_s = 1000 * 4e-6 + BASE_S
    assert ends[0.04] == pytest.approx([alone_s] * 200)
    assert ends[0.003][-1] == pytest.approx(alone_s + 199 * 0.001)
