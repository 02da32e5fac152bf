"""Whether a request would keep its SLO: pure functions of the step model and of what is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sizing import steptime

if TYPE_CHECKING:
    from sizing.plan import StepModel
    from sizing.specs.slo import SloSpec


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
class Asked:
    """
    One request.

    Attributes:
        prompt_tokens: of the prompt, or the best guess of it.
        output_tokens: that it will probably make, at least 1.
        sequences: answers to the same prompt.
        local: whether the server that decodes also computes the prompt.
    """

    prompt_tokens: float
    output_tokens: float
    sequences: int = 1
    local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    What a request meets at the servers that it would go to.

    Attributes:
        prefill_work_s: seconds of prefill that requests ahead still need, on one replica.
        prefill_replicas: that share this work.
        sequences: admitted and not finished, wherever they are.
        context_tokens: cached tokens of all of them, once they decode.
        decode_replicas: that share them.
        max_batch_size: sequences that one of these decodes at once.
    """

    prefill_work_s: float
    prefill_replicas: int
    sequences: int
    context_tokens: float
    decode_replicas: int
    max_batch_size: int

    @property
    def idle(self) -> bool:
        """Whether nobody is ahead."""
        return self.sequences == 0 and self.prefill_work_s <= 0


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
class Forecast:
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


def work_s(model: StepModel, asked: Asked, load: Load) -> float:
    """
    Seconds that a prompt keeps a replica busy, beside what else runs (docs/model.md, eq. Q9).

    Ignores: prompts that share a step, whose fixed time is paid once.
    """
    between = model.interference
    step = model.decode if asked.local else model.prefill
    alone_s = float(steptime.prefill_s(step, asked.prompt_tokens))
    if asked.local:
        return alone_s
    batch = load.sequences / max(load.decode_replicas, 1)
    slower = 1 + between.prefill_fraction + batch * between.prefill_per_sequence_fraction
    return alone_s * slower + between.prefill_per_request_s


def forecast(model: StepModel, asked: Asked, load: Load) -> Forecast:
    """
    Predict the latencies of a request that joins *load*.

    TTFT: path, the work ahead shared by the replicas, the own prompt, the KV pull, the wait for a
    place where more are admitted than the batches hold, one decode step. TPOT: a decode step with
    everybody admitted in the batch, as far as it has places, and prefill busy beside it
    (docs/model.md, eq. S2 to S4 and Q9).

    Ignores: who of those ahead finishes meanwhile, so that it errs on the side of full batches;
    how long those that join hold the batch up, which the margin learns.
    """
    decoders = max(load.decode_replicas, 1)
    together = load.sequences + asked.sequences
    places = max(load.max_batch_size, asked.sequences)
    batch = min(max(float(asked.sequences), together / decoders), float(places))
    own_tokens = asked.sequences * (asked.prompt_tokens + asked.output_tokens)
    tokens = max(own_tokens, (load.context_tokens + own_tokens) / decoders)
    step_s = float(steptime.decode_s(model.decode, batch, tokens / batch))
    if not load.idle:
        step_s *= 1 + model.interference.decode_fraction
    pull_s = 0.0 if asked.local else float(steptime.transfer_s(model.path, asked.prompt_tokens))
    ahead_s = 0.0 if asked.local else load.prefill_work_s / max(load.prefill_replicas, 1)
    # Places come free one after the other, each as long as an answer like this one takes.
    late = max(0, together - places * decoders) / (places * decoders)
    wait_s = late * asked.output_tokens * step_s
    own_s = work_s(model, asked, load)
    ttft_s = model.path.request_s + ahead_s + own_s + pull_s + wait_s + step_s
    return Forecast(ttft_s=ttft_s, tpot_s=step_s)


def decide(
    model: StepModel, slo: SloSpec, asked: Asked, load: Load, margin: Margin
) -> Shed | Forecast:
    """
    Admit a request, or say why it would miss its SLO.

    More work ahead, a longer prompt or a larger margin never admit what less would not; faster
    steps or more replicas never shed what slower or fewer would admit. With nobody ahead the
    step model alone decides, without margin: a margin learned in bad times must not lock the door.

    Args:
        model: the plan's step times.
        slo: the plan's limits; a limit on the gaps between tokens counts as one on their mean.
        asked: the request.
        load: what it meets.
        margin: what the forecast is known to miss.

    Returns:
        The forecast of what is admitted, without margin.
    """
    alone = Load(
        prefill_work_s=0.0,
        prefill_replicas=load.prefill_replicas,
        sequences=0,
        context_tokens=0.0,
        decode_replicas=load.decode_replicas,
        max_batch_size=load.max_batch_size,
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


def _unreachable(asked: Asked, floor: Forecast, slo: SloSpec, pace_s: float) -> Shed:
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
