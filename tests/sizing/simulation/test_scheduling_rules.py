"""What engines schedule differently, against what follows by hand from their rules."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.engine import EngineRules
from minicluster.workload.arrivals import Arrivals
from sizing import catalog
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.system import Path, SimulatedPool, System
from tests import plans

PROMPT_TOKEN_S, STEP_S = 1e-3, 1e-2
STEP = PlannedStep(replace(plans.STEP, base_s=STEP_S, per_prefill_token_s=PROMPT_TOKEN_S))
"""Steps of 10 ms, plus 1 ms per prompt token."""
RULES = {profile.name: profile.rules(ahead=False) for profile in catalog.engines()}
NAMES = {each.name for each in fields(EngineRules)}


def served(
    requests: list[tuple[int, int]],
    due_s: list[float] | None = None,
    *,
    engine: str = "vllm",
    users: int | None = None,
    **limits: float,
) -> Outcome:
    """Serve requests of (prompt, output) tokens on one replica; without *due_s* all at once."""
    settings: dict[str, Any] = {
        "max_num_seqs": 99, "max_num_batched_tokens": 100, "kv_blocks": 10**6, "block_size": 1,
    }  # fmt: skip
    rules = {name: value for name, value in limits.items() if name in NAMES}
    settings |= {name: value for name, value in limits.items() if name not in NAMES}
    engine_limits = EngineLimits(**settings, rules=replace(RULES[engine], **rules))
    pool = SimulatedPool(replicas=1, limits=engine_limits, step=STEP)
    count = np.arange(len(requests))
    arrivals = Arrivals(
        due_s=np.array(due_s or [0.0] * len(requests)),
        input_tokens=np.array([prompt for prompt, _ in requests]),
        output_tokens=np.array([output for _, output in requests]),
        previous=None if users is None else np.where(count < users, -1, count - users),
    )
    return simulate_system(System(decode=pool, path=Path()), arrivals, seed=0)


def firsts(found: Outcome) -> list[float]:
    """Return the times of the first tokens."""
    return list((found.due_s + found.ttft_s).tolist())


def ends(found: Outcome) -> list[float]:
    """Return the times of the last tokens."""
    return list((found.due_s + found.e2e_s).tolist())


def test_requests_of_one_moment_share_a_step() -> None:
    """A batch that is sent at once is computed at once, also when users send again together."""
    assert firsts(served([(20, 2)] * 4)) == pytest.approx([0.09] * 4)
    again = served([(20, 2)] * 4, users=2)
    assert firsts(again) == pytest.approx([0.05, 0.05, 0.11, 0.11])


def test_without_chunks_a_prompt_waits_for_a_step_with_room() -> None:
    """Two prompts of 60 in a budget of 100: vLLM cuts the second, TensorRT-LLM waits."""
    two = [(60, 1), (60, 1)]
    assert firsts(served(two, engine="vllm")) == pytest.approx([0.11, 0.14])
    assert firsts(served(two, engine="trtllm")) == pytest.approx([0.07, 0.14])
    assert firsts(served([(250, 1)], engine="vllm")) == pytest.approx([0.25 + 3 * STEP_S])
    assert firsts(served([(250, 1)], engine="trtllm")) == pytest.approx([0.25 + STEP_S])


def test_decoding_pauses_for_prompts_where_the_engine_does_not_mix() -> None:
    """While a second prompt is computed, SGLang makes no token of the first request; vLLM does."""
    two, due_s = [(10, 3), (50, 1)], [0.0, 0.021]
    paused, mixed = (served(two, due_s, engine=name) for name in ("sglang", "vllm"))
    # The first request: prompt until 20 ms, a token at 30 ms, then the second prompt's 60 ms.
    assert ends(mixed)[0] == pytest.approx(0.03 + 0.06)
    assert ends(paused)[0] == pytest.approx(0.03 + 0.06 + STEP_S)
    assert paused.stall_s[0] == pytest.approx(0.06 + STEP_S)
    assert paused.gaps[:, :2].prod(axis=1).sum() == pytest.approx(STEP_S + 0.06 + STEP_S)


def test_who_arrives_during_a_step_waits_for_the_one_after_the_next() -> None:
    """Where steps are scheduled one ahead; on an idle replica nobody waits."""
    drawn = [(10, 9), (50, 1)]
    # Steps end at 20, 30, 40 ms ...; at 33 ms the one from 40 ms on is already scheduled.
    assert firsts(served(drawn, [0.0, 0.033]))[1] == pytest.approx(0.04 + 0.06)
    late = served(drawn, [0.0, 0.033], scheduled_ahead=True)
    assert firsts(late)[1] == pytest.approx(0.05 + 0.06)
    idle = served([(10, 2), (50, 1)], [0.0, 0.05], scheduled_ahead=True)
    assert firsts(idle)[1] == pytest.approx(0.05 + 0.06)


def test_new_requests_are_received_every_so_many_decode_steps() -> None:
    """With a look every 4 steps, and one right after each step of prompts."""
    drawn, due_s = [(10, 30), (50, 1), (20, 1)], [0.0, 0.033, 0.07]
    # The first prompt ends at 20 ms and decodes; the next looks are at 60 ms, and once the second
    # prompt's 60 ms are over.
    found = served(drawn, due_s, engine="sglang", receive_steps=4)
    assert firsts(found) == pytest.approx([0.02, 0.06 + 0.06, 0.12 + 0.03])
    each = served(drawn, due_s, engine="sglang")
    assert firsts(each) == pytest.approx([0.02, 0.04 + 0.06, 0.1 + 0.03])
    alone = served([(10, 2), (50, 1)], [0.0, 0.05], engine="sglang", receive_steps=4)
    assert firsts(alone)[1] == pytest.approx(0.05 + 0.06)  # an idle replica looks at once


def test_prompts_wait_for_company_where_the_recipe_says_so() -> None:
    """At most so many steps, not at all beside nobody, and no longer than the budget is filled."""
    patient: dict[str, float] = {"wait_steps": 4, "wait_fraction": 0.9}
    one = served([(10, 30), (20, 1)], [0.0, 0.015], **patient)
    # The first prompt takes 20 ms; the second waits until 60 ms, then takes 30 ms with its step.
    assert firsts(one) == pytest.approx([0.02, 0.06 + 0.03])
    many = served([(10, 30), (45, 1), (45, 1)], [0.0, 0.015, 0.025], **patient)
    # Two of 45 tokens fill the budget: they wait from 20 ms to the next boundary only.
    assert firsts(many)[1:] == pytest.approx([0.03 + 0.1] * 2)


def test_reserved_kv_cache_makes_requests_wait() -> None:
    """TensorRT-LLM reserves a request whole: with room for one, the second waits for its end."""
    two = [(50, 10), (50, 10)]
    found = served(two, engine="trtllm", kv_blocks=100)
    assert firsts(found)[1] == pytest.approx(ends(found)[0] + 0.06)
    assert firsts(served(two, kv_blocks=100))[1] < ends(found)[0]


def test_preempted_requests_start_over_and_finish() -> None:
    """VLLM admits both, drops the younger when the cache is full, and computes it again."""
    two = [(40, 30), (40, 30)]
    tight = served(two, max_num_batched_tokens=200, kv_blocks=100)
    roomy = served(two, max_num_batched_tokens=200)
    assert max(ends(tight)) > max(ends(roomy))
    assert tight.preemptions.tolist() == [0, 1]
    whole = served(two, engine="trtllm", max_num_batched_tokens=200, kv_blocks=100)
    assert whole.preemptions.sum() == 0
