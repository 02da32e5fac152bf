"""Groups of simulated ranks under the real cluster: they step, die and start together."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.deployed import Split
from tests.serving.faults.load import body_of, under_way
from tests.waiting import until

from .conftest import GROUPS, RANKS, RATE, SLOWDOWN, answer_limits
from .rounds import HEAD, Offered, Round, offering, outcome

pytestmark = pytest.mark.simulated

STREAMS = 8
"""Two a rank, more or less."""

TOKENS = 80
SLOW_FACTOR = 3.0


def halves(cluster: Split) -> list[list[dict[str, Any]]]:
    """Return the ranks of each group, the group with the busiest rank first, and that first."""
    by_group: dict[str, list[dict[str, Any]]] = {}
    for rank in sorted(cluster("inside")["decode"], key=lambda each: -int(each["running"])):
        by_group.setdefault(rank["gang"], []).append(rank)
    assert [len(group) for group in by_group.values()] == [RANKS] * GROUPS
    return list(by_group.values())


def running(group: list[dict[str, Any]]) -> int:
    return sum(rank["running"] for rank in group)


def streams() -> list[dict[str, Any]]:
    return [body_of(seed, tokens=50, max_tokens=TOKENS) for seed in range(STREAMS)]


def test_a_slow_rank_slows_its_group_alone(cluster: Split) -> None:
    """All requests of its group wait for it at each step, those of its peer too."""
    cluster.wait_until_whole()
    with under_way(cluster.base_url, streams()) as waiting:
        cluster.wait_until_decoding(STREAMS)
        slowed, other = halves(cluster)
        cluster("fault", "decode", "slow", SLOW_FACTOR, [slowed[0]["replica"]])
    cluster("fault", "decode", "slow", 1.0, [slowed[0]["replica"]])
    replies = [each.result() for each in waiting]
    assert all(reply.done for reply in replies), replies
    decoded_s = sorted(reply.seconds - reply.first_s for reply in replies)
    assert running(slowed) + running(other) == STREAMS
    assert slowed[1]["running"], "the slow rank's peer had no stream that could wait for it"
    quick, slow = decoded_s[: running(other)], decoded_s[running(other) :]
    assert slow[0] > SLOW_FACTOR / 2 * max(quick, default=0.0), (running(slowed), decoded_s)
    assert slow[-1] < 1.2 * slow[0], "ranks of a group did not step together"


def test_a_killed_rank_costs_its_group_alone(
    cluster: Split, moe_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Streams of its group break with an error event, and those of the other group go on.

    New requests are answered by the other group, or refused in time. Then the whole group has been
    replaced, and the other one has not.
    """
    cluster.wait_until_whole()
    limits = answer_limits(moe_model)
    load = Offered(requests=24, requests_per_s=RATE / SLOWDOWN)
    with under_way(cluster.base_url, streams()) as waiting:
        cluster.wait_until_decoding(STREAMS)
        killed, other = halves(cluster)
        with (
            offering(cluster.base_url, load, random.Random(1)) as sent,  # noqa: S311
            pytest.raises(RuntimeError),  # it cannot answer that it has ended
        ):
            cluster("fault", "decode", "exit", 1.0, [killed[0]["replica"]])
    replies = [each.result() for each in waiting]
    assert sum(reply.done for reply in replies) == running(other)
    assert [bool(reply.error) for reply in replies].count(True) == running(killed) > 0
    ended = [(body, asked.result()) for body, asked in sent]
    played = outcome(Round(role="decode", fault="exit", victims=1), ended, limits)
    assert played.wrong == ()
    before = {rank["pid"] for rank in killed}
    until(lambda: not before & {each.pid for each in cluster.find("decode")}, "both ranks end")
    cluster.wait_until_whole()
    cluster.wait_until_released()
    after = {rank["pid"] for group in halves(cluster) for rank in group}
    assert after > {rank["pid"] for rank in other}
    assert not after & before
    with capsys.disabled():
        sys.stdout.write(f"\n{HEAD}\n{played.row(1, SLOWDOWN)}\n")
