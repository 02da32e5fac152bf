"""Numbers from which the time of one engine step is evaluated; see `minicluster.plan.step_time`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from minicluster.specs.checks import Count, NotNegative, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients(Spec):
    """
    One pool's step time, eq. S1 of docs/model.md.

        t = base + experts (1 - q^(n + B)) + max(stream, a n + b B) + c pairs + d context

    n: prompt tokens computed in the step, B: sequences decoded in it, pairs: sum over prompt
    tokens of the tokens they attend to, context: cached tokens read by the decoded sequences.
    Without a mixture of experts the second term is zero.

    Attributes:
        base_s: per step, whatever is in it.
        stream_s: reading the weights once; what compute hides behind.
        per_prefill_token_s, per_sequence_s, per_pair_s, per_context_token_s: a, b, c, d.
        max_tokens, max_batch: largest n and B that the fit saw.
        max_context_tokens: longest sequence that it saw.
        error_fraction: mean absolute relative error of the fit.
        experts_s: reading all routed experts once.
        expert_miss_fraction: q, chance that one token leaves an expert alone, 1 - k / E.
    """

    base_s: NotNegative
    stream_s: NotNegative
    per_prefill_token_s: NotNegative
    per_sequence_s: NotNegative
    per_pair_s: NotNegative
    per_context_token_s: NotNegative
    max_tokens: Count
    max_batch: Count
    max_context_tokens: int
    error_fraction: NotNegative
    experts_s: NotNegative = 0.0
    expert_miss_fraction: NotNegative = 0.0

    def scaled(self, factor: float) -> StepCoefficients:
        """Return the coefficients of a step that takes *factor* times as long."""
        return _scaled(self, "_s", factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCoefficients(Spec):
    """
    Seconds of a request between the two pools, outside their steps.

    Attributes:
        request_s: ingress, routing and RPC, once per request.
        transfer_base_s: fixed part of the KV pull.
        transfer_per_token_s: KV pull per prompt token.
        error_fraction: as of a step.
    """

    request_s: NotNegative
    transfer_base_s: NotNegative
    transfer_per_token_s: NotNegative
    error_fraction: NotNegative

    def scaled(self, factor: float) -> PathCoefficients:
        """Return a path that takes *factor* times as long."""
        return _scaled(self, "_s", factor)


DELAYS_PER_REQUEST = 2
"""Times that a request delays the decode batch: as it is handed over, and as it joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference(Spec):
    """
    Slowdown of a pool's steps by the other pool on the same cores.

    Zero where pools share nothing.

    Attributes:
        prefill_fraction: added to prefill in service, whatever decode does at the moment: requests
            are received, routed and handed over by the same cores.
        prefill_per_sequence_fraction: added to prefill for each sequence being decoded: every
            token on its way to a client takes time from the cores.
        prefill_per_request_s: added to each prompt: the cores also receive, route and hand over.
        decode_fraction: added to a decode step while prefill is busy.
        decode_per_request_s: what each request that joins the batch delays all of it, in
            `DELAYS_PER_REQUEST` equal parts.
    """

    prefill_fraction: NotNegative = 0.0
    prefill_per_sequence_fraction: NotNegative = 0.0
    prefill_per_request_s: NotNegative = 0.0
    decode_fraction: NotNegative = 0.0
    decode_per_request_s: NotNegative = 0.0

    def scaled(self, *, prefill: float, decode: float) -> Interference:
        """Return the same with what is added to either pool's steps times its factor."""
        return _scaled(_scaled(self, "prefill_", prefill), "decode_", decode)


Coefficients = TypeVar("Coefficients", StepCoefficients, PathCoefficients, Interference)


def _scaled(found: Coefficients, affix: str, factor: float) -> Coefficients:
    """Multiply the fields whose names begin or end with *affix*."""
    names = [f.name for f in fields(found) if f.name.startswith(affix) or f.name.endswith(affix)]
    return replace(found, **{name: factor * getattr(found, name) for name in names})
