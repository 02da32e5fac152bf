"""Groups of simulated ranks under the real cluster: they die and start together."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.deployed import Split
from tests.serving.faults.load import body_of, under_way
from tests.waiting import until

from .conftest import GROUPS, RATE, SLOWDOWN, answer_limits
from .rounds import HEAD, Offered, Round, offering, outcome

pytestmark = pytest.mark.simulated

STREAMS = 8
"""Two a rank, more or less."""

TOKENS = 80


def groups(cluster: Split) -> list[dict[str, Any]]:
    """Return what the processes of the groups have inside, the busiest first."""
    found: list[dict[str, Any]] = cluster("inside")["decode"]
    assert len(found) == GROUPS
    return sorted(found, key=lambda each: -int(each["running"]))


def test_a_killed_group_costs_its_requests_alone(
    cluster: Split, moe_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Its streams break with an error event, and those of the other group go on.

    New requests are answered by the other group, or refused in time. Then the group has been
    replaced, and the other one has not.
    """
    cluster.wait_until_whole()
    limits = answer_limits(moe_model)
    load = Offered(requests=24, requests_per_s=RATE / SLOWDOWN)
    streams = [body_of(seed, tokens=50, max_tokens=TOKENS) for seed in range(STREAMS)]
    with under_way(cluster.base_url, streams) as waiting:
        cluster.wait_until_decoding(STREAMS)
        killed, other = groups(cluster)
        with (
            offering(cluster.base_url, load, random.Random(1)) as sent,  # noqa: S311
            pytest.raises(RuntimeError),  # it cannot answer that it has ended
        ):
            cluster("fault", "decode", "exit", 1.0, [killed["replica"]])
    replies = [each.result() for each in waiting]
    assert sum(reply.done for reply in replies) == other["running"]
    assert [bool(reply.error) for reply in replies].count(True) == killed["running"] > 0
    ended = [(body, asked.result()) for body, asked in sent]
    played = outcome(Round(role="decode", fault="exit", victims=1), ended, limits)
    assert played.wrong == ()
    until(lambda: killed["pid"] not in {each.pid for each in cluster.find("decode")}, "it ends")
    cluster.wait_until_whole()
    cluster.wait_until_released()
    after = {each["pid"] for each in groups(cluster)}
    assert other["pid"] in after
    assert killed["pid"] not in after
    with capsys.disabled():
        sys.stdout.write(f"\n{HEAD}\n{played.row(1, SLOWDOWN)}\n")
