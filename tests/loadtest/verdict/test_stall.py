from __future__ import annotations

import pytest

from loadtest.verdict.stall import find_stalls
from minicluster.workload.samples import Sample
from tests.loadtest.made import make_sample


def steady(count: int) -> list[Sample]:
    return [make_sample(index, 0.1 * index) for index in range(count)]


def test_one_stalled_transfer_is_found() -> None:
    """A request that others overtake while it waits is suspected, and only that one."""
    samples = steady(100)
    samples[30] = make_sample(30, 3.0, ttft_s=3.0)

    assert find_stalls(samples).indices == (30,)


def test_lone_stall_is_found() -> None:
    """A request that waits long with nobody else about has no queue to blame."""
    samples = [make_sample(index, 10.0 * index) for index in range(9)]
    samples[4] = make_sample(4, 40.0, ttft_s=5.0)

    assert find_stalls(samples).indices == (4,)


def test_timeout_before_the_first_token_is_found() -> None:
    """A transfer that never came back counts too; a refused connection does not."""
    samples = steady(600)
    samples[30] = make_sample(30, 3.0, ttft_s=None, outcome="timeout", end_s=33.0)
    samples[40] = make_sample(40, 4.0, ttft_s=None, outcome="refused", end_s=24.0)

    assert find_stalls(samples).indices == (30,)


@pytest.mark.parametrize("blocked_s", [1.5, 4.0, 20.0])
def test_queue_is_no_stall(blocked_s: float) -> None:
    """When everybody waits and leaves in order, however long, it is a queue."""
    samples = steady(1000)
    for i in range(100, 1000):
        ends_s = max(10.0 + blocked_s + 0.02 * (i - 100), samples[i].due_s + 0.05)
        samples[i] = make_sample(i, 0.1 * i, ttft_s=ends_s - 0.1 * i)

    assert find_stalls(samples).count == 0


def test_nothing_has_no_stall() -> None:
    assert find_stalls([]).count == 0
