"""The admission decision: pure functions of the step model, the load and one request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minicluster.plan import step_time
from serving.protocol.messages import Refusal
from serving.request.length import answer_tokens, prompt_size, prompts_in
from serving.request.prefill import must_be_local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.plan import StepModel
    from minicluster.specs.slo import SloSpec
    from minicluster.specs.step import StepSpec
    from serving.protocol.endpoint_config import EndpointConfig
    from serving.request.length import TokenEstimate

LARGEST_MARGIN = 0.9
"""
Largest margin, as a fraction of (SLO limit - latency on an idle cluster). Below 1, so that a few
requests are always admitted and the margin can recover.
"""

LARGEST_TAIL = 0.6
"""
Largest part of the margin beyond the median, as a fraction of the same difference. Stalls of a
machine come at any load: a margin with room for all of them sheds most of a load that the cluster
could serve, and the stalls stay (2026-11-22, two cores, p99 of 50 ms per token in answers of ten
tokens: 272 of 443 requests).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """
    The cost of one request.

    Attributes:
        prompt_tokens: of the longest prompt, as far as known.
        output_tokens: expected tokens of each answer, at least 1.
        sequences: answers to all of its prompts.
        other_tokens: of the other prompts, one by one.
        local: whether the server that decodes also computes the prompt.
        kind: `chat` or `completions`.
        text_bytes: bytes of the one text that the engine's count of prompt tokens is for; 0: none,
            because several prompts share one count, and a truncated one is counted in part only.
    """

    prompt_tokens: float
    output_tokens: float
    sequences: int = 1
    other_tokens: tuple[float, ...] = ()
    local: bool = False
    kind: str = "completions"
    text_bytes: int = 0

    @property
    def all_tokens(self) -> float:
        """Tokens of all prompts, and of all answers as long as they may be."""
        prompts = self.prompt_tokens + sum(self.other_tokens)
        return prompts + self.sequences * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """
    The size of one request, as its body has it.

    Attributes:
        kind: `chat` or `completions`.
        prompts: token ids and bytes of text of each prompt, as `prompt_size` returns them.
        output_tokens: tokens of each answer, as requested; `None`: the request does not say.
        sequences: answers to all prompts.
        counted: whether the engine's count of prompt tokens is for one whole text.
        local: whether the answering server has to compute the prompt (`must_be_local`).
    """

    kind: str
    prompts: tuple[tuple[int, int], ...]
    output_tokens: int | None
    sequences: int
    counted: bool
    local: bool


def request_size(kind: str, body: Mapping[str, Any]) -> RequestSize:
    """Return the size of a request that `serving.request.validation.check` accepted."""
    prompts = prompts_in(kind, body)
    return RequestSize(
        kind=kind,
        prompts=tuple(map(prompt_size, prompts)),
        output_tokens=answer_tokens(kind, body),
        sequences=int(body.get("n") or 1) * len(prompts),
        counted=len(prompts) == 1 and body.get("truncate_prompt_tokens") is None,
        local=must_be_local(body) is not None,
    )


def request_cost(size: RequestSize, config: EndpointConfig, estimate: TokenEstimate) -> RequestCost:
    """Return the cost of a request; an answer of unknown length counts as the longest planned."""
    lengths = (min(estimate.tokens(*each), float(config.max_model_len)) for each in size.prompts)
    tokens, *others = sorted(lengths, reverse=True)
    room = max(1.0, config.max_model_len - tokens)
    planned = room if config.workload is None else config.workload.longest_answer_tokens
    requested = size.output_tokens
    return RequestCost(
        prompt_tokens=tokens,
        output_tokens=float(min(planned if requested is None else max(1, requested), room)),
        sequences=size.sequences,
        other_tokens=tuple(others),
        local=size.local or not config.split or tokens <= config.routing.local_threshold_tokens,
        kind=size.kind,
        text_bytes=size.prompts[0][1] if size.counted else 0,
    )


@dataclass(slots=True)
class PoolInFlight:
    """
    The load of the replicas of one role in one domain, at least one of them.

    Attributes:
        work_s: seconds that the prompts ahead still need, on one replica.
        waiting: requests whose prompts these are.
        sequences: admitted and not finished, in any phase.
        context_tokens: cached tokens of all of them, once they decode.
        per_token_s: seconds that prompts computed here add between two tokens of one replica, if
            each answer is followed by one like it.
        live: whether there is a replica at all.
    """

    replicas: int
    work_s: float = 0.0
    waiting: int = 0
    sequences: int = 0
    context_tokens: float = 0.0
    per_token_s: float = 0.0
    live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightLoad:
    """
    The load of the replicas that a request would use.

    Attributes:
        max_batch_size: sequences that one replica decodes at once.
        max_step_tokens: tokens of prompts that one of these computes in a step.
        prefill_busy_fraction: share of the time in which a prefill replica computes.
        tokens_per_step: that a sequence gets of a decode step on average; above 1 with drafts.
    """

    prefill: PoolInFlight
    decode: PoolInFlight
    max_batch_size: int
    max_step_tokens: int
    prefill_busy_fraction: float
    tokens_per_step: float

    @property
    def idle(self) -> bool:
        """No request is ahead; `decode` counts its sequences in every phase."""
        return self.decode.sequences == 0 and self.prefill.work_s <= 0

    def emptied(self) -> InflightLoad:
        """Return the same replicas without requests."""
        return replace(
            self,
            prefill=PoolInFlight(self.prefill.replicas),
            decode=PoolInFlight(self.decode.replicas),
            prefill_busy_fraction=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """
    The residuals of earlier forecasts (measured minus forecast), added to the next one.

    Attributes:
        ttft_s, tpot_s: at the SLO's percentile.
        median_ttft_s, median_tpot_s: at the median: the error of the step model.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    median_ttft_s: float = 0.0
    median_tpot_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionForecast:
    """The latencies that a request would see, without margin."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """
    The decision not to admit a request.

    Attributes:
        reason: `ttft` or `tpot`; `unreachable`: not even on an idle cluster; `key`: beyond a limit
            of the client's key.
        retry_after_s: when there may be room; `None`: never.
    """

    reason: str
    message: str
    retry_after_s: float | None

    @property
    def refusal(self) -> Refusal:
        """The answer that the client gets, its time in whole seconds, as HTTP takes them."""
        code = "rate_limit_exceeded" if self.reason == "key" else f"slo_{self.reason}"
        if self.retry_after_s is None:
            return Refusal(status=429, message=self.message, code=code)
        seconds = max(1, math.ceil(self.retry_after_s))
        message = f"{self.message} Try again in {seconds} s."
        return Refusal(status=429, message=message, code=code, retry_after_s=seconds)


def work_s(model: StepModel, cost: RequestCost, load: InflightLoad) -> float:
    """
    Return the seconds that the prompts of a request take from a replica.

    In the prefill pool: the time until it is done, slowed by what else runs. Where decode computes
    the prompts: what they add to its steps, and the share of these steps that they fill
    (docs/model.md, eq. G1).

    Ignores: prompts that share a step of the prefill pool, whose fixed time is paid once.
    """
    if cost.local:
        prompts = (cost.prompt_tokens, *cost.other_tokens)
        filled = sum(prompts) / load.max_step_tokens * _step_s(model, cost, load)
        return filled + sum(_added_s(model.decode, load, tokens) for tokens in prompts)
    between = model.interference
    unloaded_s = _prompt_s(model.prefill, cost.prompt_tokens)
    batch = load.decode.sequences / load.decode.replicas
    slower = 1 + between.prefill_fraction + batch * between.prefill_per_sequence_fraction
    return unloaded_s * slower + between.prefill_per_request_s


def _prompt_s(step: StepSpec, tokens: float, batch: int = 0) -> float:
    """Return the seconds of a step that computes a prompt beside so many sequences."""
    return step.step_s(tokens, tokens * (tokens + 1) / 2, batch, 0)


def _added_s(step: StepSpec, load: InflightLoad, tokens: float) -> float:
    """Return the seconds that a prompt adds to the step of a full batch, which is made anyway."""
    return _prompt_s(step, tokens, load.max_batch_size) - step.step_s(0, 0, load.max_batch_size, 0)


def forecast(model: StepModel, cost: RequestCost, load: InflightLoad) -> AdmissionForecast:
    """
    Predict the latencies of a request that joins *load*.

    TTFT: path, the work ahead shared by the replicas, the request's own prompt, the KV pull, the
    wait for a place where more are admitted than the batches hold, one decode step. TPOT: a decode
    step with every admitted sequence in the batch, as far as it has places, slowed by prefill for
    the share of the time in which that is busy, and in it the prompts that decode computes
    (docs/model.md, eq. G2 to G4).

    It decides in microseconds, so it is an estimate, the only one beside the event simulation
    (`sizing simulate`): of TTFT nearly always too high. `tests/serving/admission` compares the
    decisions of both: at most 1 % of the requests are admitted that the simulation has late, and
    at least 90 % are decided alike (75 % in a mixed pool near its capacity).

    Ignores: which requests ahead finish meanwhile, so that it overestimates batches; prompts that
    share a step; how long sequences that join hold the batch up, which the margin learns.
    """
    prefill, decode = load.prefill, load.decode
    step_s = _step_s(model, cost, load)
    # A step computes no more prompt tokens than its budget, however many wait.
    most_s = _added_s(model.decode, load, load.max_step_tokens)
    each = load.tokens_per_step
    pace_s = step_s / each + min(decode.per_token_s / decode.replicas, most_s / each)
    if cost.local:
        own_s = _prompt_s(model.decode, cost.prompt_tokens)
        pull_s = 0.0
        ahead_s = decode.work_s / decode.replicas
    else:
        own_s = work_s(model, cost, load)
        pull_s = float(step_time.transfer_s(model.path, cost.prompt_tokens))
        ahead_s = prefill.work_s / prefill.replicas
    # Places come free one after the other, each as long as an answer like this one takes.
    together = decode.sequences + cost.sequences
    places = max(load.max_batch_size, cost.sequences) * decode.replicas
    wait_s = max(0, together - places) / places * cost.output_tokens * pace_s
    ingress_s = model.path.request_s + model.path.request_spread_s
    ttft_s = ingress_s + ahead_s + own_s + pull_s + wait_s + step_s
    return AdmissionForecast(ttft_s=ttft_s, tpot_s=pace_s)


def _step_s(model: StepModel, cost: RequestCost, load: InflightLoad) -> float:
    """Return the seconds of a decode step of all admitted sequences, without prompts."""
    decode = load.decode
    places = max(load.max_batch_size, cost.sequences)
    batch = max(float(cost.sequences), (decode.sequences + cost.sequences) / decode.replicas)
    batch = min(batch, float(places))
    own_tokens = cost.sequences * (cost.prompt_tokens + cost.output_tokens)
    tokens = max(own_tokens, (decode.context_tokens + own_tokens) / decode.replicas)
    step_s = model.decode.step_s(0, 0, batch, tokens)
    return step_s * (1 + load.prefill_busy_fraction * model.interference.decode_fraction)


def decide(
    model: StepModel, slo: SloSpec, cost: RequestCost, load: InflightLoad, margin: Margin
) -> Shed | AdmissionForecast:
    """
    Admit a request, or return why it would miss its SLO.

    Monotone: more work ahead, a longer prompt or a larger margin never admit what less would not;
    faster steps or more replicas never shed what slower or fewer would admit.
    On an idle cluster the step model alone decides, so that a margin learned under overload cannot
    shed every request for ever (docs/model.md, eq. G5).

    A limit on the gaps between tokens counts as one on their mean.

    Returns:
        The forecast of what is admitted, without margin.
    """
    floor = forecast(model, cost, load.emptied())
    pace_s = min(slo.tpot_s or math.inf, slo.itl_s or math.inf)
    if floor.ttft_s > slo.ttft_s or floor.tpot_s > pace_s:
        return _unreachable(cost, floor, slo, pace_s)
    found = forecast(model, cost, load)
    if load.idle:
        return found
    more_s = _margin_s(margin.ttft_s, margin.median_ttft_s, slo.ttft_s - floor.ttft_s)
    late_s = found.ttft_s + more_s - slo.ttft_s
    if late_s > 0:
        return _shed("ttft", "the queue is too long for the promised time to first token", late_s)
    more_s = _margin_s(margin.tpot_s, margin.median_tpot_s, pace_s - floor.tpot_s)
    if found.tpot_s + more_s > pace_s:
        wait_s = cost.output_tokens * found.tpot_s
        return _shed("tpot", "the batch is too large for the promised pace of tokens", wait_s)
    return found


def _margin_s(percentile_s: float, median_s: float, room_s: float) -> float:
    """Return the margin, bounded by parts of *room_s*: limit less latency when idle."""
    median_s = min(median_s, percentile_s)
    tail_s = min(percentile_s - median_s, LARGEST_TAIL * room_s)
    return min(median_s + tail_s, LARGEST_MARGIN * room_s)


def _shed(reason: str, why: str, wait_s: float) -> Shed:
    return Shed(reason=reason, message=f"Not admitted: {why}.", retry_after_s=min(wait_s, 60))


def _unreachable(cost: RequestCost, floor: AdmissionForecast, slo: SloSpec, pace_s: float) -> Shed:
    if floor.ttft_s > slo.ttft_s:
        what = (
            f"a prompt of about {cost.prompt_tokens:.0f} tokens takes {floor.ttft_s:.2f} s to the "
            f"first token, and {slo.ttft_s:g} s are promised"
        )
    else:
        what = f"tokens come every {floor.tpot_s:.3f} s at best, and {pace_s:g} s are promised"
    return Shed(
        reason="unreachable",
        message=f"Not admitted, and never will be by this endpoint: {what}.",
        retry_after_s=None,
    )
