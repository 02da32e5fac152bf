"""Whether a request would keep its SLO: pure functions of the step model and of what is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.plan import step_time

if TYPE_CHECKING:
    from minicluster.plan import StepModel
    from minicluster.specs.slo import SloSpec
    from minicluster.specs.step import StepCoefficients


LARGEST_MARGIN = 0.9
"""
Of the room between what an idle cluster takes and the limit. What is left lets a few requests in
however wrong the model is; what they take teaches the margin anew.
"""

LARGEST_TAIL = 0.6
"""
Likewise of what a few requests take beyond what most do. Hiccups of a machine come at any load: a
guard that makes room for all of them sheds most of a load that it could serve, and the hiccups
stay (2026-11-22, two cores, p99 of 50 ms a token in answers of ten tokens: 272 of 443 requests).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """
    One request.

    Attributes:
        prompt_tokens: of the prompt, or the best guess of it; of several the longest one.
        output_tokens: that it will probably make, at least 1.
        sequences: answers to all of its prompts.
        other_tokens: of the other prompts, one by one.
        local: whether the server that decodes also computes the prompt.
    """

    prompt_tokens: float
    output_tokens: float
    sequences: int = 1
    other_tokens: tuple[float, ...] = ()
    local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightLoad:
    """
    What a request meets at the servers that it would go to.

    Attributes:
        prefill_work_s: seconds of prefill that requests ahead still need, on one replica.
        prefill_replicas: that share this work.
        sequences: admitted and not finished, wherever they are.
        context_tokens: cached tokens of all of them, once they decode.
        decode_replicas: that share them.
        max_batch_size: sequences that one of these decodes at once.
        max_step_tokens: of prompts, that one of these computes in a step.
        local_work_s: like `prefill_work_s`, of prompts that these compute themselves.
        local_per_token_s: of such prompts, seconds that come on one replica while everybody makes
            a token, if each answer is followed by one like it.
    """

    prefill_work_s: float
    prefill_replicas: int
    sequences: int
    context_tokens: float
    decode_replicas: int
    max_batch_size: int
    max_step_tokens: int
    local_work_s: float = 0.0
    local_per_token_s: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether nobody is ahead."""
        return self.sequences == 0 and self.prefill_work_s <= 0 and self.local_work_s <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """
    What requests took beyond their prediction; added to the next.

    Attributes:
        ttft_s, tpot_s: at the SLO's percentile.
        typical_ttft_s, typical_tpot_s: half of them more: what the model has wrong.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    typical_ttft_s: float = 0.0
    typical_tpot_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionForecast:
    """What a request would see: `ttft_s` with everybody ahead, `tpot_s` in the fullest batch."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """
    Why a request is not admitted.

    Attributes:
        reason: `ttft`, `tpot`; `unreachable`: not even with nobody ahead.
        message: for the client.
        retry_after_s: when there may be room; `None`: never.
    """

    reason: str
    message: str
    retry_after_s: int | None


def work_s(model: StepModel, asked: RequestCost, load: InflightLoad) -> float:
    """
    Seconds that the prompts of a request take from a replica.

    Of the prefill pool, until it is done, beside what else runs; where decode computes them, what
    they add to its steps, and of these steps the share that they fill (docs/model.md, eq. G1).

    Ignores: prompts that share a step of the prefill pool, whose fixed time is paid once.
    """
    if asked.local:
        prompts = (asked.prompt_tokens, *asked.other_tokens)
        filled = sum(prompts) / load.max_step_tokens * _step_s(model, asked, load)
        return filled + sum(_added_s(model.decode, tokens) for tokens in prompts)
    between = model.interference
    alone_s = float(step_time.prefill_s(model.prefill, asked.prompt_tokens))
    batch = load.sequences / max(load.decode_replicas, 1)
    slower = 1 + between.prefill_fraction + batch * between.prefill_per_sequence_fraction
    return alone_s * slower + between.prefill_per_request_s


def _added_s(step: StepCoefficients, tokens: float) -> float:
    """Seconds that a prompt adds to a step that runs anyway."""
    return step.per_prefill_token_s * tokens + step.per_pair_s * tokens * (tokens + 1) / 2


def forecast(model: StepModel, asked: RequestCost, load: InflightLoad) -> AdmissionForecast:
    """
    Predict the latencies of a request that joins *load*.

    TTFT: path, the work ahead shared by the replicas, the own prompt, the KV pull, the wait for a
    place where more are admitted than the batches hold, one decode step. TPOT: a decode step with
    everybody admitted in the batch, as far as it has places, prefill busy beside it, and in it the
    prompts that decode computes (docs/model.md, eq. G2 to G4).

    Ignores: who of those ahead finishes meanwhile, so that it errs on the side of full batches;
    how long those that join hold the batch up, which the margin learns; prompts that a step
    computes while it reads the weights.
    """
    decoders = max(load.decode_replicas, 1)
    step_s = _step_s(model, asked, load)
    # A step computes no more of prompts than it has room for, however many wait.
    most_s = model.decode.per_prefill_token_s * load.max_step_tokens
    pace_s = step_s + min(load.local_per_token_s / decoders, most_s)
    if asked.local:
        own_s = float(step_time.prefill_s(model.decode, asked.prompt_tokens))
        pull_s = 0.0
        ahead_s = load.local_work_s / decoders
    else:
        own_s = work_s(model, asked, load)
        pull_s = float(step_time.transfer_s(model.path, asked.prompt_tokens))
        ahead_s = load.prefill_work_s / max(load.prefill_replicas, 1)
    # Places come free one after the other, each as long as an answer like this one takes.
    together = load.sequences + asked.sequences
    places = max(load.max_batch_size, asked.sequences) * decoders
    wait_s = max(0, together - places) / places * asked.output_tokens * pace_s
    ttft_s = model.path.request_s + ahead_s + own_s + pull_s + wait_s + step_s
    return AdmissionForecast(ttft_s=ttft_s, tpot_s=pace_s)


def _step_s(model: StepModel, asked: RequestCost, load: InflightLoad) -> float:
    """Seconds of a decode step with everybody in it, prompts left out."""
    decoders = max(load.decode_replicas, 1)
    places = max(load.max_batch_size, asked.sequences)
    batch = max(float(asked.sequences), (load.sequences + asked.sequences) / decoders)
    batch = min(batch, float(places))
    own_tokens = asked.sequences * (asked.prompt_tokens + asked.output_tokens)
    tokens = max(own_tokens, (load.context_tokens + own_tokens) / decoders)
    step_s = float(step_time.decode_s(model.decode, batch, tokens / batch))
    return step_s if load.idle else step_s * (1 + model.interference.decode_fraction)


def decide(
    model: StepModel, slo: SloSpec, asked: RequestCost, load: InflightLoad, margin: Margin
) -> Shed | AdmissionForecast:
    """
    Admit a request, or say why it would miss its SLO.

    More work ahead, a longer prompt or a larger margin never admit what less would not; faster
    steps or more replicas never shed what slower or fewer would admit. With nobody ahead the
    step model alone decides, without margin: a margin learned in bad times must not lock the door
    (docs/model.md, eq. G5).

    Args:
        model: the plan's step times.
        slo: the plan's limits; a limit on the gaps between tokens counts as one on their mean.
        asked: the request.
        load: what it meets.
        margin: what the forecast is known to miss.

    Returns:
        The forecast of what is admitted, without margin.
    """
    alone = InflightLoad(
        prefill_work_s=0.0,
        prefill_replicas=load.prefill_replicas,
        sequences=0,
        context_tokens=0.0,
        decode_replicas=load.decode_replicas,
        max_batch_size=load.max_batch_size,
        max_step_tokens=load.max_step_tokens,
    )
    floor = forecast(model, asked, alone)
    pace_s = min(slo.tpot_s or math.inf, slo.itl_s or math.inf)
    if floor.ttft_s > slo.ttft_s or floor.tpot_s > pace_s:
        return _unreachable(asked, floor, slo, pace_s)
    if load.idle:
        return floor
    found = forecast(model, asked, load)
    more_s = _more_s(margin.ttft_s, margin.typical_ttft_s, slo.ttft_s - floor.ttft_s)
    late_s = found.ttft_s + more_s - slo.ttft_s
    if late_s > 0:
        return _shed("ttft", "the queue is too long for the promised time to first token", late_s)
    more_s = _more_s(margin.tpot_s, margin.typical_tpot_s, pace_s - floor.tpot_s)
    if found.tpot_s + more_s > pace_s:
        wait_s = asked.output_tokens * found.tpot_s
        return _shed("tpot", "the batch is too large for the promised pace of tokens", wait_s)
    return found


def _more_s(at_share_s: float, typical_s: float, room_s: float) -> float:
    """Return what to add to a forecast, of the room above that of an idle cluster."""
    typical_s = min(typical_s, at_share_s)
    tail_s = min(at_share_s - typical_s, LARGEST_TAIL * room_s)
    return min(typical_s + tail_s, LARGEST_MARGIN * room_s)


def _shed(reason: str, why: str, wait_s: float) -> Shed:
    """Round the wait up to whole seconds, as HTTP wants it."""
    seconds = max(1, math.ceil(min(wait_s, 60)))
    return Shed(
        reason=reason,
        message=f"Not admitted: {why}. Try again in {seconds} s.",
        retry_after_s=seconds,
    )


def _unreachable(asked: RequestCost, floor: AdmissionForecast, slo: SloSpec, pace_s: float) -> Shed:
    """Say what even an idle cluster cannot do."""
    if floor.ttft_s > slo.ttft_s:
        what = (
            f"a prompt of about {asked.prompt_tokens:.0f} tokens takes {floor.ttft_s:.2f} s to the "
            f"first token, and {slo.ttft_s:g} s are promised"
        )
    else:
        what = f"tokens come every {floor.tpot_s:.3f} s at best, and {pace_s:g} s are promised"
    return Shed(
        reason="unreachable",
        message=f"Not admitted, and never will be by this endpoint: {what}.",
        retry_after_s=None,
    )
