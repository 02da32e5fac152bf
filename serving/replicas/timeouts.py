"""How long the front door waits for the servers behind it: from the plan's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.request.answer_length import answer_tokens
from serving.request.prompt_length import prompts_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.endpoint_config import EndpointConfig

SLACK_S = 2.0
"""Beyond both deadlines, until a decode replica that says nothing is given up."""

PACE_FACTOR = 10.0
"""
Of the promised time per token. Generous: a beam search prefills anew for each token, and this is
to end what hangs, not what is slow.
"""

UNPLANNED_TOKEN_S = 1.0
"""Per token where no plan promises a pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """
    Seconds to wait.

    Attributes:
        prefill_s: for a prompt that goes through prefill alone.
        first_token_s: for the first token of a stream.
        token_s: for each token beyond.
        max_tokens: of an answer whose request names no length.
        places: sequences that one replica decodes at once.
    """

    prefill_s: float
    first_token_s: float
    token_s: float
    max_tokens: int
    places: int

    def whole_s(self, kind: str, body: Mapping[str, Any]) -> float:
        """
        Return how long an answer in one piece may take.

        More sequences than places are answered in turns.

        Args:
            kind: `chat` or `completions`.
            body: what `serving.request.validation.check` let through.
        """
        named = answer_tokens(kind, body)
        tokens = self.max_tokens if named is None else named
        sequences = (body.get("n") or 1) * len(prompts_of(body.get("prompt")))
        turns = math.ceil(sequences / self.places)
        return self.first_token_s + turns * tokens * self.token_s


def patience_of(front: EndpointConfig) -> Timeouts:
    """Take from what the front door knows how long to wait."""
    token_s = UNPLANNED_TOKEN_S
    if front.slo is not None and front.promise is not None:
        token_s = PACE_FACTOR * (front.slo.per_token_s or front.promise.tpot.p99_s)
    return Timeouts(
        prefill_s=front.prefill_deadline_s,
        first_token_s=front.prefill_deadline_s + front.kv_wait_deadline_s + SLACK_S,
        token_s=token_s,
        max_tokens=front.max_model_len,
        places=next(pool.max_batch_size for pool in front.pools if pool.role != "prefill"),
    )
