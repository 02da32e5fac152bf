"""What a request asks for, as far as its body says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.admission.policy import RequestCost
from serving.request.answer_length import answer_tokens
from serving.request.prefill_eligibility import must_be_local
from serving.request.prompt_length import prompt_tokens, prompts_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.endpoint_config import EndpointConfig
    from serving.request.prompt_length import TextSize


def asked_of(
    kind: str, body: Mapping[str, Any], front: EndpointConfig, size: TextSize
) -> RequestCost:
    """
    Size a request that `serving.request.validation.check` let through.

    Args:
        kind: `chat` or `completions`.
        body: the request.
        front: what is planned; answers of which nobody says how long they are, are as long as
            the longest planned one.
        size: of text, the best guess.
    """
    prompts = prompts_in(kind, body)
    sizes = (min(prompt_tokens(each, size), float(front.max_model_len)) for each in prompts)
    tokens, *others = sorted(sizes, reverse=True)
    room = max(1.0, front.max_model_len - tokens)
    planned = room if front.promise is None else front.promise.workload.output_tokens.max_tokens
    wanted = answer_tokens(kind, body)
    local = must_be_local(body) is not None or tokens <= front.local_threshold_tokens
    return RequestCost(
        prompt_tokens=tokens,
        output_tokens=float(min(planned if wanted is None else max(1, wanted), room)),
        sequences=int(body.get("n") or 1) * len(prompts),
        other_tokens=tuple(others),
        local=local or not front.split,
    )
