"""The log of a vLLM engine's steps: their seconds add up to the clock's while there is work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from serving.replicas import vllm_plugin
from serving.replicas.vllm_plugin import StepLog


class Clock:
    """A clock that a test sets, monotonic and Unix at once."""

    now_s = 100.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now_s

    def time(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the log."""
    clock = Clock()
    monkeypatch.setattr(vllm_plugin, "time", clock)
    return clock


def scheduled(new: dict[str, tuple[int, int]], running: dict[str, int]) -> SimpleNamespace:
    """
    Return a step as vLLM schedules it.

    Args:
        new: tokens computed before and in this step, of requests that are new to the engine.
        running: tokens computed before, of requests that decode.
    """
    tokens = {name: count for name, (_, count) in new.items()} | dict.fromkeys(running, 1)
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before)
            for name, (before, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running), num_computed_tokens=list(running.values())
        ),
    )


def run_step(
    log: StepLog, clock: Clock, step: SimpleNamespace, seconds: float, *, work_left: bool
) -> None:
    """Schedule a step and end it."""
    log.scheduled(step)
    clock.now_s += seconds
    log.ended(step, work_left=work_left)


def test_seconds_of_a_busy_engine_add_up(clock: Clock) -> None:
    """What lies between two steps belongs to the second one if there was work, else to none."""
    log = StepLog()
    run_step(log, clock, scheduled({"a": (0, 84)}, {}), 0.5, work_left=True)
    clock.now_s += 0.125  # vLLM sends the outputs
    run_step(log, clock, scheduled({}, {"a": 84}), 0.25, work_left=False)
    clock.now_s += 10  # nothing to do
    run_step(log, clock, scheduled({"b": (64, 20)}, {}), 0.5, work_left=False)
    steps = log.between(0, 1000)
    assert [step.seconds for step in steps] == [0.5, 0.375, 0.5]
    assert [step.end_unix_s for step in steps] == [100.5, 100.875, 111.375]


def test_steps_that_overlap_count_once(clock: Clock) -> None:
    """A step scheduled before the last one ended lasts from that end."""
    log = StepLog()
    first, second = scheduled({"a": (0, 84)}, {}), scheduled({}, {"a": 84})
    log.scheduled(first)
    clock.now_s += 0.25
    log.scheduled(second)
    clock.now_s += 0.25
    log.ended(first, work_left=True)
    clock.now_s += 0.125
    log.ended(second, work_left=False)
    assert [step.seconds for step in log.between(0, 1000)] == [0.5, 0.125]


def test_what_was_in_a_step(clock: Clock) -> None:
    """Prompts with their tokens and pairs, sequences with their context, and those that joined."""
    log = StepLog()
    step = scheduled({"a": (0, 3), "b": (10, 2), "pulled": (50, 1)}, {"c": 99})
    run_step(log, clock, step, 0.5, work_left=False)
    (seen,) = log.between(0, 1000)
    assert (seen.prompts, seen.prompt_tokens) == (2, 5)
    assert seen.pairs == (1 + 2 + 3) + (11 + 12)
    assert (seen.sequences, seen.context_tokens, seen.joined) == (2, 51 + 100, 3)


def test_only_steps_of_the_interval_and_of_computation(clock: Clock) -> None:
    """A step without a token, of requests that wait for their KV cache, is none."""
    log = StepLog()
    run_step(log, clock, scheduled({}, {}), 0.5, work_left=False)
    for _ in range(4):
        run_step(log, clock, scheduled({}, {"a": 84}), 1.0, work_left=True)
    assert len(log.between(0, 1000)) == 4
    assert [step.end_unix_s for step in log.between(102.5, 104.5)] == [102.5, 103.5]
