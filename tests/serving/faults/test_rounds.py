"""Failure 3, at length: what real engines hold and take after many kills under load."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.serving.deployed import Split

from .load import Load
from .processes import RAY, kill

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

ROUNDS = 20
DECODE_ROUNDS = (2, 4)
EARLY = 5
GROWTH = 0.05
CLIENTS = 3
ROLES = (
    *tuple(
        f"{role}{part}" for role in ("prefill", "decode") for part in ("", "/engine", "/worker")
    ),
    "ingress",
    "controller",
    *RAY,
)


def _resident(wide: Split) -> dict[str, float]:
    """Return resident memory by role, in MB; of several replicas the largest."""
    sizes: dict[str, float] = defaultdict(float)
    for each in wide.find(*ROLES):
        sizes[each.role] = max(sizes[each.role], each.resident_bytes / 1e6)
    return dict(sizes)


def test_rounds_of_kills_under_load(wide: Split, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Replicas are killed for 20 rounds under load: prefill in turn, at first decode too.

    Expected of real engines: no request ends without a word; afterwards no KV cache is held, and
    no process that serves has grown by more than 5 % since round 5. What answers contain and how
    long they take is tested with simulated engines (tests/serving/simulated).
    Ray's own, of 10 to 80 MB, are printed only: they keep a history of dead processes, and
    raylets of 15 MB gain 3 without any load.
    """
    wide.wait_until_whole()
    early: dict[str, float] = {}
    with Load(wide.base_url, CLIENTS) as load:
        for number in range(1, ROUNDS + 1):
            # Decode early, then never: it has to outlive the prefill replicas it knew.
            role = "decode" if number in DECODE_ROUNDS else "prefill"
            victims = wide.find(role)
            kill(victims[number % len(victims)])
            time.sleep(2)
            wide.wait_until_whole()
            time.sleep(1)
            if number == EARLY:
                early = _resident(wide)
    wide.wait_until_released()
    late = _resident(wide)
    with capsys.disabled():
        sys.stdout.write("\n".join(_summary(early, late)))
    lost = [reply for reply in load.replies if not reply.done and not reply.error]
    assert not lost, lost[:3]
    assert sum(reply.done for reply in load.replies) > len(load.replies) / 2
    grown = {role: late[role] / size - 1 for role, size in early.items() if role not in RAY}
    assert {role: share for role, share in grown.items() if share > GROWTH} == {}


def _summary(early: dict[str, float], late: dict[str, float]) -> Iterator[str]:
    yield f"\nMB resident after {EARLY} and {ROUNDS} kills:"
    for role, size in early.items():
        yield f"{role:16} {size:9.1f} {late[role]:9.1f} {late[role] / size - 1:+7.1%}"
