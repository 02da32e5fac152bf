"""The simulation against the plain one: same times, request by request."""

from __future__ import annotations

import numpy as np
import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.engine import EngineOptions, EngineRules
from minicluster.specs.step import StepCoefficients, StepTable
from minicluster.workload.arrivals import Arrivals
from sizing.simulation.event_loop import EventLoop
from sizing.simulation.system import Path, SimulatedPool, System
from tests.sizing.stepwise import StepTandem


def step(rng: np.random.Generator) -> PlannedStep:
    """Draw coefficients, or a table."""
    if rng.random() < 0.5:
        fixed_s = np.cumsum(rng.uniform(1e-3, 2e-2, (2, 3)), axis=1)
        fixed_s[1] += float(rng.uniform(0, 1e-2))
        return PlannedStep(
            StepTable(
                tokens=(0.0, 30.0, 1000.0),
                sequences=(0.0, 40.0),
                fixed_s=tuple(tuple(row) for row in fixed_s.tolist()),
                per_key_s=tuple(rng.uniform(0, 1e-5, 3).tolist()),
                per_context_token_s=tuple(rng.uniform(0, 1e-4, 2).tolist()),
            )
        )
    return PlannedStep(
        StepCoefficients(
            base_s=float(rng.uniform(1e-3, 5e-3)),
            stream_s=float(rng.uniform(0, 1e-2)),
            per_prefill_token_s=float(rng.uniform(1e-5, 1e-4)),
            per_sequence_s=float(rng.uniform(0, 3e-3)),
            per_pair_s=float(rng.uniform(0, 1e-6)),
            per_context_token_s=float(rng.choice([0.0, rng.uniform(0, 1e-4)])),
            max_tokens=1000,
            max_batch=100,
            max_context_tokens=1000,
            error_fraction=0.0,
        )
    )


def rules(rng: np.random.Generator) -> EngineRules:
    """Draw what engines schedule differently."""
    return EngineRules(
        mixed_steps=bool(rng.random() < 0.5),
        chunked_prefill=bool(rng.random() < 0.5),
        kv_reserved_fraction=float(rng.choice([0.0, 0.5, 1.0])),
        scheduled_ahead=bool(rng.random() < 0.5),
        wait_steps=int(rng.choice([0, 3])),
        wait_fraction=0.9,
        receive_steps=int(rng.choice([1, 4])),
    )


def pool(rng: np.random.Generator, *, longest: int, tight: bool, other: bool) -> SimulatedPool:
    """Draw a pool; *tight*: the KV cache holds little more than the longest request."""
    size = int(rng.choice([1, 2, 4, 16]))
    seqs = int(rng.integers(1, 9))
    needed = -(-longest // size)
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=int(rng.integers(seqs, 60)),
        kv_blocks=needed + int(rng.integers(1, needed + 2)) if tight else 20 * needed,
        block_size=size,
        options=EngineOptions(chunked_prefill_tokens=int(rng.choice([0, 0, 7]))),
        rules=rules(rng) if other else EngineRules(),
    )
    return SimulatedPool(replicas=int(rng.integers(1, 4)), limits=limits, step=step(rng))


def case(seed: int, *, split: bool, tight: bool, other: bool) -> tuple[System, Arrivals]:
    """Draw a system and its requests."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    prompts, outputs = rng.integers(1, 60, count), rng.integers(1, 40, count)
    policies = ["power-of-two", "round-robin", "least-tokens", "random"]
    longest = int((prompts + outputs).max())
    system = System(
        decode=pool(rng, longest=longest, tight=tight, other=other),
        prefill=pool(rng, longest=longest, tight=tight, other=other) if split else None,
        path=Path(
            request_s=float(rng.choice([0.0, 0.003])),
            transfer_base_s=float(rng.uniform(0, 0.02)),
            transfer_per_token_s=float(rng.uniform(0, 1e-3)),
            handshake_s=float(rng.choice([0.0, 0.05])),
        ),
        decode_policy=str(rng.choice(policies)),
        prefill_policy=str(rng.choice(policies)),
        local_threshold_tokens=int(rng.choice([0, 0, 20])),
    )
    due = np.cumsum(rng.exponential(rng.choice([0.002, 0.02, 0.2]), count))
    previous = None
    if rng.random() < 0.3:
        users = int(rng.integers(1, count + 1))
        previous = np.where(np.arange(count) < users, -1, np.arange(count) - users)
    return system, Arrivals(
        due_s=due,
        input_tokens=prompts,
        output_tokens=outputs,
        previous=previous,
        think_s=None if previous is None else rng.exponential(0.01, count),
        prefix_tokens=rng.integers(0, 30, count) if rng.random() < 0.5 else None,
    )


def compare(seed: int, *, split: bool, tight: bool, other: bool) -> int:
    """Run both; return how many requests were preempted."""
    system, arrivals = case(seed, split=split, tight=tight, other=other)
    fast = EventLoop(system, arrivals, seed=seed)
    fast.run()
    slow = StepTandem(system, arrivals, seed=seed)
    slow.run()
    requests, jobs = fast.requests, slow.jobs
    assert requests.num_preemptions == [job.preemptions for job in jobs]
    assert fast.decode_of == [job.decode for job in jobs]
    assert fast.prefill_of == [job.prefill for job in jobs]
    columns = {
        "due": fast.due_s, "finish": requests.finished_s, "pull": fast.pull_s,
        "pulled": fast.pulled_s, "prefilled": fast.prefilled_s, "admitted": requests.scheduled_s,
    }  # fmt: skip
    for name, column in columns.items():
        expected = [job.times.get(name, np.inf) for job in jobs]
        np.testing.assert_allclose(column, expected, rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(
        requests.first_token_s, [job.tokens_at[0] for job in jobs], rtol=1e-9
    )
    stalls = [max(np.diff(job.tokens_at), default=0.0) for job in jobs]
    np.testing.assert_allclose(requests.stall_s, stalls, rtol=1e-6, atol=1e-9)
    gaps = np.array([gap for replica in fast.decode for gap in replica.gaps]).reshape(-1, 3)[:, :2]
    assert gaps[:, 1].sum() == sum(job.outputs - 1 for job in jobs)
    np.testing.assert_allclose(
        gaps.prod(axis=1).sum(),
        sum(job.tokens_at[-1] - job.tokens_at[0] for job in jobs),
        rtol=1e-9,
    )
    assert [replica.used_blocks for replica in fast.decode + fast.prefill] == [
        system.decode.limits.kv_blocks - replica.free for replica in slow.decode
    ] + [0] * len(slow.prefill)
    return sum(requests.num_preemptions)


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("split", [False, True], ids=["aggregated", "split"])
@pytest.mark.parametrize("other", [False, True], ids=["vLLM", "other rules"])
def test_same_times_as_step_by_step(
    split: bool,  # noqa: FBT001
    tight: bool,  # noqa: FBT001
    other: bool,  # noqa: FBT001
) -> None:
    """Every time of every request is that of the plain simulator, to 1e-9."""
    preemptions = sum(compare(seed, split=split, tight=tight, other=other) for seed in range(60))
    assert (preemptions > 40) == tight
