"""Rounds of faults under an overload that does not wait for answers, on simulated engines."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from serving.simulated.answering import answer_ids, prompt_seed, token_text
from tests.serving.client import Reply, send
from tests.serving.deployed import Split, outstanding
from tests.serving.faults.load import body_of
from tests.waiting import until

FAULTS = {
    "prefill": ("die", "exit", "freeze", "slow", "fail-pulls"),
    "decode": ("die", "exit", "freeze", "slow", "lose-streams"),
}
"""What can go wrong, by role: only prefill has pulls that fail, and only decode has streams."""

DEADLY = ("die", "exit")

BACK_TO_NORMAL = {"slow": 1.0, "fail-pulls": 0.0, "lose-streams": 0.0}
"""The values that end a fault."""

FREEZE_S = {1: 70.0, 2: 12.0}
"""By the number of replicas: one far beyond every limit, or two for about as long as one."""

SLOW_FACTOR = 10.0
SPOILED = 4
"""Pulls that fail, or streams that break, of each replica."""

FAULT_AFTER_S = 2.5
CLIENT_LIMIT_S = 150.0
"""After which the client gives up, far beyond every limit of the endpoint."""

REFUSALS = (429, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """
    What a load is held to; seconds of the clock.

    Attributes:
        first_s: until the first token of a stream.
        token_s: beyond it, for each token asked for, until the end of any answer.
        event_s: until the next event of a stream.
        vocab_size: of the model.
    """

    first_s: float
    token_s: float
    event_s: float
    vocab_size: int

    def end_s(self, body: dict[str, Any]) -> float:
        event_s = max(self.first_s, self.event_s) if body["stream"] else 0.0
        return self.first_s + event_s + float(body["max_tokens"]) * self.token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Poisson arrivals of the clock: so many requests, at so many per second."""

    requests: int
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One fault in one or two replicas of a role."""

    role: str
    fault: str
    victims: int

    @property
    def value(self) -> float:
        return {"freeze": FREEZE_S[self.victims], "slow": SLOW_FACTOR}.get(self.fault, SPOILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """A round that is over: how its requests ended, and what was wrong with an end."""

    played: Round
    requests: int
    answered: int
    refused: int
    broken: int
    slowest_s: float
    wrong: tuple[str, ...]

    def row(self, number: int, slowdown: float) -> str:
        played = self.played
        return (
            f"| {number} | {played.fault} | {played.victims} {played.role} | {self.requests}"
            f" | {self.answered} | {self.refused} | {self.broken}"
            f" | {self.slowest_s / slowdown:.1f} |"
        )


HEAD = (
    "| round | fault | replicas | requests | answered | refused | error events"
    " | slowest, plan seconds |\n|---|---|---|---|---|---|---|---|"
)


def total_row(outcomes: Sequence[RoundOutcome], slowdown: float) -> str:
    sums = [
        sum(getattr(each, name) for each in outcomes)
        for name in ("requests", "answered", "refused", "broken")
    ]
    counts = " | ".join(map(str, sums))
    slowest_s = max(each.slowest_s for each in outcomes)
    return f"| all | | | {counts} | {slowest_s / slowdown:.1f} |"


def all_rounds(seed: int) -> list[Round]:
    """Return every fault in one and in two replicas of each role, in an order drawn by *seed*."""
    rounds = [
        Round(role=role, fault=fault, victims=victims)
        for role, faults in FAULTS.items()
        for fault, victims in product(faults, (1, 2))
    ]
    random.Random(seed).shuffle(rounds)  # noqa: S311
    return rounds


@contextmanager
def offering(
    url: str, load: Offered, rng: random.Random
) -> Iterator[list[tuple[dict[str, Any], Future[Reply]]]]:
    """Send requests at their times, whatever becomes of others; at the end all have ended."""
    sent: list[tuple[dict[str, Any], Future[Reply]]] = []
    bodies = [
        body_of(
            rng.randrange(1 << 30),
            tokens=rng.randint(50, 900),
            max_tokens=rng.randint(1, 24),
            stream=rng.random() < 0.7,
        )
        for _ in range(load.requests)
    ]
    with ThreadPoolExecutor(max_workers=load.requests) as clients:

        def offer() -> None:
            for body in bodies:
                time.sleep(rng.expovariate(load.requests_per_s))
                asked = clients.submit(send, f"{url}/v1/completions", body, CLIENT_LIMIT_S)
                sent.append((body, asked))

        offering = threading.Thread(target=offer)
        offering.start()
        try:
            yield sent
        finally:
            offering.join()


def play(
    cluster: Split, played: Round, load: Offered, limits: AnswerLimits, seed: int
) -> RoundOutcome:
    """Play a round, see that it leaves nothing behind, and how its requests ended."""
    rng = random.Random(seed)  # noqa: S311
    victims = rng.sample(cluster("inside")[played.role], played.victims)
    names = [each["replica"] for each in victims]
    with offering(cluster.base_url, load, rng) as sent:
        time.sleep(FAULT_AFTER_S)
        try:
            cluster("fault", played.role, played.fault, played.value, names)
        except RuntimeError:
            assert played.fault == "exit"  # it cannot answer that it has ended
    ended = [(body, asked.result()) for body, asked in sent]
    _restore(cluster, played, victims)
    return outcome(played, ended, limits)


def outcome(
    played: Round, ended: Sequence[tuple[dict[str, Any], Reply]], limits: AnswerLimits
) -> RoundOutcome:
    """Return how the requests of a round ended."""
    replies = [reply for _, reply in ended]
    return RoundOutcome(
        played=played,
        requests=len(replies),
        answered=sum(reply.done for reply in replies),
        refused=sum(reply.status in REFUSALS for reply in replies),
        broken=sum(reply.status == 200 and not reply.done for reply in replies),
        slowest_s=max(reply.seconds for reply in replies),
        wrong=tuple(found for body, reply in ended if (found := complaint(body, reply, limits))),
    )


def _restore(cluster: Split, played: Round, victims: Sequence[dict[str, Any]]) -> None:
    """Wait until what died is replaced and gone, and what was asked for is free again."""
    if played.fault in BACK_TO_NORMAL:
        names = [each["replica"] for each in victims]
        cluster("fault", played.role, played.fault, BACK_TO_NORMAL[played.fault], names)
    if played.fault in DEADLY:
        dead = {each["pid"] for each in victims}
        until(
            lambda: not dead & {each.pid for each in cluster.find(played.role)},
            f"no process of {victims}",
        )
    cluster.wait_until_whole()
    until(lambda: outstanding(cluster.base_url) == 0, "no request in flight")
    until(lambda: not _inside(cluster), f"no request and no KV block held after {played}")


def _inside(cluster: Split) -> list[dict[str, Any]] | str:
    """Return the engines that have something inside; a text where not all of them answer."""
    try:
        found = cluster("inside")
    except RuntimeError as error:
        return str(error)
    if any(len(found[role]) != number for role, number in cluster.replicas.items()):
        return f"not all replicas: {found}"
    counts = ("running", "waiting", "kv_blocks")
    return [each for of in found.values() for each in of if any(each[name] for name in counts)]


def complaint(body: dict[str, Any], reply: Reply, limits: AnswerLimits) -> str:
    """Say what is wrong with the end of a request; empty: nothing."""
    asked = f"{'stream' if body['stream'] else 'plain'} of {body['max_tokens']} tokens"
    shown = f"{asked}: {reply.status} after {reply.seconds:.1f} s, {reply.path}, {reply.error}"
    if reply.seconds > limits.end_s(body):
        return f"too late (limit {limits.end_s(body):.1f} s), {shown}"
    if reply.first_s > limits.first_s:
        return f"first token after {reply.first_s:.1f} s, {shown}"
    if reply.status in REFUSALS:
        error = reply.body.get("error", {})
        as_openai = {"message", "type", "param", "code"} <= set(error) and error["message"]
        can_retry = int(reply.headers.get("retry-after", 0)) >= 1
        return "" if as_openai and can_retry else f"no proper refusal, {shown} {reply.headers}"
    if reply.status != 200:
        return f"neither an answer nor a refusal, {shown}"
    ids = answer_ids(prompt_seed(body["prompt"]), body["max_tokens"], limits.vocab_size)
    right = "".join(map(token_text, ids)).split()
    given = _text(reply).split()
    if reply.done:
        return "" if given == right else f"{given} instead of {right}, {shown}"
    if not (reply.events and reply.error):
        return f"cut without a word after {len(given)} tokens, {shown}"
    if given != right[: len(given)]:
        return f"begins with {given} instead of {right}, {shown}"
    return ""


def _text(reply: Reply) -> str:
    chunks = [json.loads(each) for each in reply.events if each != "[DONE]"] or [reply.body]
    return "".join(choice["text"] for each in chunks for choice in each.get("choices", ()))
