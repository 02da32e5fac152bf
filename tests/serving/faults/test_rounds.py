"""Failure 3, at length: replicas are killed under load, again and again."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from tests.serving.client import Reply
from tests.serving.deployed import Split

from .load import DEADLINE_S, Load
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
    wide.wait_until_released()
    late = _resident(wide)
    replies = load.replies
    with capsys.disabled():
        sys.stdout.write("\n".join(_summary(replies, early, late)))
    lost = [r for r in replies if not r.done and not r.error]
    assert not lost, lost[:3]
    # The machine's two cores start engines meanwhile; what waits for nothing ends far later.
    assert max(_overrun_s(reply) for reply in replies) < DEADLINE_S
    assert sum(r.done for r in replies) > len(replies) / 2
    grown = {role: late[role] / size - 1 for role, size in early.items() if role not in RAY}
    assert {role: share for role, share in grown.items() if share > GROWTH} == {}


def _summary(
    replies: list[Reply], early: dict[str, float], late: dict[str, float]
) -> Iterator[str]:
    done = sum(reply.done for reply in replies)
    overrun_s = max(_overrun_s(reply) for reply in replies)
    yield f"\n{ROUNDS} kills, {len(replies)} requests, {done} answered, the rest by an error:"
    counted = Counter(f"{reply.status} {reply.path or reply.error}" for reply in replies)
    yield from (f"{count:5} {what}" for what, count in sorted(counted.items()))
    yield f"first token or error after its deadline: {overrun_s:+.1f} s; MB resident:"
    for role, size in early.items():
        yield f"{role:16} {size:9.1f} {late[role]:9.1f} {late[role] / size - 1:+7.1%}"
