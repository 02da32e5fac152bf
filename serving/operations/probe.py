"""The probes of `serving up`: requests over every prefill → decode pair, until none stalls."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from minicluster.errors import TargetFailed
from minicluster.http_client.sse import DONE, EventParser, EventTooLongError
from serving.api.access import authorization
from serving.api.tls import trusting
from serving.cluster.serve_compat import NO_REPLICA_ERRORS, call_replicas
from serving.protocol.app_spec import APP
from serving.request.cost import read_token_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.serve.handle import DeploymentHandle

    from serving.protocol.app_spec import ServedApp, ServedPool
    from serving.protocol.messages import RequestPhases


STALL_S = 1.0
"""A KV transfer that takes longer is counted as stalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """
    The result of the probes that follow a deployment.

    Attributes:
        stalls: transfers longer than `STALL_S` before enough rounds in a row had none.
        handoff_s: slowest transfer of the last round, first decode step included.
        ttft_s: time of the streamed completion at the end; `None`: there was none.
    """

    stalls: int
    handoff_s: float
    ttft_s: float | None = None


IN_A_ROW = 3
"""Consecutive rounds without a stall that make a deployment ready."""

ROUNDS = 15
"""Rounds until a deployment counts as failed."""

FIRST_LIMIT_S = 600.0
"""Limit of the first round, before the machine's speed is known; NIXL itself has none."""

LEAST_LIMIT_S = 60.0

PACE_FACTOR = 20.0
"""Limit of later rounds: this multiple of the last round, and at least `LEAST_LIMIT_S`."""

STALL_FACTOR = 10.0
"""A transfer stalls if it takes this multiple of the fastest one, and longer than `STALL_S`."""

PROMPT_TOKENS = 100
"""Prompt length of a probe: several KV blocks, the last of them not full."""

BLOCK_BYTES = 65536
"""Most bytes of a stream that are read at once."""

OUTPUT_TOKENS = 4
"""Tokens of the completion at the end, if the operator's limit allows them."""


def wait_until_ready(
    served: ServedApp,
    *,
    base_url: str,
    vocab_size: int,
    report: Callable[[str], None],
    tls_cert: str = "",
) -> Readiness:
    """Probe as `probe_pairs`, then stream one completion from the endpoint; raises as it does."""
    rng = random.Random(time.time_ns())  # noqa: S311  (prompts that no prefix cache has)
    probed, limit_s = probe_pairs(served, vocab_size, rng, report)
    prompt = _prompt(vocab_size, rng)
    ttft_s = stream_completion(base_url, served.model_id, prompt, limit_s, tls_cert)
    return replace(probed, ttft_s=ttft_s)


def probe_pairs(
    served: ServedApp, vocab_size: int, rng: random.Random, report: Callable[[str], None]
) -> tuple[Readiness, float]:
    """
    Probe every pair of replicas until three rounds in a row went without a stall.

    Returns the result, and the limit of a further request, seconds.

    Raises:
        TargetFailed: a probe failed, or stalls do not end.
    """
    pairs = sum(_probes(served, pool) * pool.replicas for pool in served.servers)
    what = "prefill → decode pair(s)" if served.endpoint.split else "replica(s)"
    stalls, in_a_row, slowest, fastest = 0, 0, 0.0, math.inf
    limit_s = FIRST_LIMIT_S
    for _ in range(ROUNDS):
        report(f"probing {pairs} {what}: {in_a_row} of {IN_A_ROW} rounds good")
        started = time.monotonic()
        handoffs = [
            phases.decode_s if phases.prefill_replica else 0.0
            for pool in served.servers
            for phases in _round(served, pool, vocab_size, rng, limit_s)
        ]
        took_s = time.monotonic() - started
        limit_s = max(LEAST_LIMIT_S, PACE_FACTOR * took_s)
        fastest = min(fastest, *handoffs)
        stalled = sum(seconds > max(STALL_S, STALL_FACTOR * fastest) for seconds in handoffs)
        stalls, slowest = stalls + stalled, max(handoffs)
        in_a_row = 0 if stalled else in_a_row + 1
        if in_a_row == IN_A_ROW:
            return Readiness(stalls=stalls, handoff_s=slowest), limit_s
    raise TargetFailed(
        f"KV transfers keep stalling: {stalls} of {ROUNDS * pairs} took more than {STALL_S} s"
    )


def _probes(served: ServedApp, pool: ServedPool) -> int:
    return sum(prefill.replicas for prefill in served.of("prefill")) if pool.role == "decode" else 1


def _round(
    served: ServedApp, server: ServedPool, vocab_size: int, rng: random.Random, limit_s: float
) -> list[RequestPhases]:
    probes = _probes(served, server)
    prompts = [[_prompt(vocab_size, rng) for _ in range(probes)] for _ in range(server.replicas)]
    waiting = iter(prompts)
    prefill = [serve.get_deployment_handle(pool.name, APP) for pool in served.of("prefill")]
    try:
        handle = known_handle(server.name, limit_s)
    except NO_REPLICA_ERRORS as error:
        reason = _message(error, limit_s)
        raise TargetFailed(f"no {server.role} replica answers: {reason}") from None
    try:
        answers: list[list[RequestPhases]] = ask_replicas(
            handle, "probe", limit_s, lambda: [next(waiting), prefill]
        )
    except TimeoutError:
        raise TargetFailed(f"a KV transfer did not come within {limit_s:.0f} s") from None
    except NO_REPLICA_ERRORS as error:
        reason = _message(error, limit_s)
        raise TargetFailed(f"a {server.role} replica ended during its probe: {reason}") from None
    if len(answers) != server.replicas:
        raise TargetFailed(f"{len(answers)} of {server.replicas} {server.role} replicas answered")
    return [phases for answer in answers for phases in answer]


def known_handle(name: str, limit_s: float) -> DeploymentHandle[Any]:
    """
    Return a handle that knows its replicas: its first ordinary call finds them.

    Raises:
        NO_REPLICA_ERRORS: no replica answers within *limit_s*.
    """
    handle = serve.get_deployment_handle(name, APP)
    first = handle.facts.remote()
    try:
        first.result(timeout_s=limit_s)
    except NO_REPLICA_ERRORS:
        with contextlib.suppress(*NO_REPLICA_ERRORS):  # a call that was never sent raises again
            first.cancel()  # its router would go on looking for a replica, and start a Ray for that
        raise
    return handle


def ask_replicas(
    handle: DeploymentHandle[Any],
    method: str,
    limit_s: float,
    arguments: Callable[[], list[Any]] = list,
) -> list[Any]:
    """Return every replica's answer to a call, within *limit_s*; raises as `known_handle`."""
    answers: list[Any] = ray.get(call_replicas(handle, method, arguments), timeout=limit_s)
    return answers


def _message(error: Exception, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing within {limit_s:.0f} s"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def stream_completion(
    base_url: str,
    model_id: str,
    prompt: list[int],
    limit_s: float = LEAST_LIMIT_S,
    tls_cert: str = "",
) -> float:
    """
    Stream a short completion, with *limit_s* for each part; return the seconds to the first token.

    By HTTPS, the certificate of *tls_cert* is trusted (`serving.api.tls.trusting`).

    Raises:
        TargetFailed: no answer, an error, or a stream that ends early.
    """
    tokens = min(OUTPUT_TOKENS, read_token_limit(os.environ) or OUTPUT_TOKENS)
    body = {"model": model_id, "prompt": prompt, "max_tokens": tokens, "stream": True}
    request = urllib.request.Request(  # noqa: S310  (our own endpoint)
        f"{base_url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **authorization(os.environ)},
    )
    started = time.perf_counter()
    try:
        with urllib.request.urlopen(  # noqa: S310
            request, timeout=limit_s, context=trusting(tls_cert)
        ) as answer:
            parser = EventParser()
            arrivals = [
                (time.perf_counter() - started, event)
                for received in iter(lambda: answer.read1(BLOCK_BYTES), b"")
                for event in parser.feed(received)
            ]
    except urllib.error.HTTPError as error:
        raise TargetFailed(f"{base_url} answered {error.code}: {error.read()!r}") from None
    except (OSError, EventTooLongError) as error:
        raise TargetFailed(f"{base_url} does not answer: {error}") from None
    if len(arrivals) < 2 or arrivals[-1][1] != DONE:  # noqa: PLR2004  (a token, the end)
        raise TargetFailed(f"{base_url}: the stream ended early: {arrivals[-1:]}")
    return arrivals[0][0]


def _prompt(vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab_size // 2, vocab_size * 3 // 4) for _ in range(PROMPT_TOKENS)]
