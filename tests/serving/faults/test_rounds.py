"""Failure 3, at length: replicas are killed under load, again and again."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from .load import DEADLINE_S, Load
from .processes import RAY, kill

if TYPE_CHECKING:
    from tests.serving.client import Reply
    from tests.serving.deployed import Split

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


def _overrun_s(reply: Reply) -> float:
    """Return how long after its deadline a request got its first token or its error."""
    spoken = reply.body.get("error", {}).get("code")
    # Only what was prefilled has the second deadline too.
    limit_s = DEADLINE_S if reply.status >= 500 and spoken != "kv-wait-timeout" else 2 * DEADLINE_S
    return (reply.first_s or reply.seconds) - limit_s


def test_rounds_of_kills_under_load(wide: Split, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Replicas are killed for 20 rounds under load: prefill in turn, at first decode too.

    Expected: every request gets an answer or an error, none later than its deadlines; afterwards
    no KV cache is held, and no process that serves has grown by more than 5 % since round 5.
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
            _say(capsys, f"round {number}: {role} killed, {len(load.replies)} replies so far")
    wide.wait_until_released()
    late = _resident(wide)
    replies = load.replies
    _report(capsys, replies, early, late)
    lost = [r for r in replies if not r.done and not r.error]
    assert not lost, lost[:3]
    # The machine's two cores start engines meanwhile; what waits for nothing ends far later.
    assert max(_overrun_s(reply) for reply in replies) < DEADLINE_S
    assert sum(r.done for r in replies) > len(replies) / 2
    grown = {role: late[role] / size - 1 for role, size in early.items() if role not in RAY}
    assert {role: share for role, share in grown.items() if share > GROWTH} == {}


def _say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{text}")
        sys.stdout.flush()


def _report(
    capsys: pytest.CaptureFixture[str],
    replies: list[Reply],
    early: dict[str, float],
    late: dict[str, float],
) -> None:
    counted: dict[str, int] = defaultdict(int)
    for reply in replies:
        counted[f"{reply.status} {reply.path or reply.error}"] += 1
    done = sum(reply.done for reply in replies)
    lines = [f"{ROUNDS} kills, {len(replies)} requests, {done} answered, the rest by an error:"]
    lines += [f"{count:5} {what}" for what, count in sorted(counted.items())]
    lines.append(f"{'process':16} {'round 5':>9} {'round 20':>9} {'growth':>7}   MB resident")
    lines += [
        f"{role:16} {size:9.1f} {late[role]:9.1f} {late[role] / size - 1:+7.1%}"
        for role, size in early.items()
    ]
    slowest = max(reply.first_s or reply.seconds for reply in replies)
    overrun = max(_overrun_s(reply) for reply in replies)
    lines.append(f"slowest first token or error {slowest:.1f} s; after its deadline {overrun:+.1f}")
    _say(capsys, "\n".join([*lines, ""]))
