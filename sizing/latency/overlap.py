"""Two-batch overlap: one half of a step communicates with its experts while the other computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from sizing.latency.step import Term

DISPATCH, COMBINE = "expert dispatch", "expert combine"
"""Terms that are overlapped."""

EXPERTS = ("experts up", "experts down", "engine per expert layer")
"""Terms between a dispatch and its combine."""


def overlapped(
    half: Iterable[Term], *, layers: int, expert_layers: int, on_sms: bool
) -> tuple[Term, ...]:
    """
    Return the terms of both halves of a step, as they run through the layers in turn.

        t = 2 (L a + L_e e) + L_e ((D - a)+ + (D - e)+ + (C - e)+ + (C - a)+) + min(a, C),
        (x)+ = max(0, x): per layer with experts the sum of max(a, D), max(e, D), max(e, C) and
        max(a, C)      (docs/model.md, eq. S11)

    a and e are what one half computes of a layer without its experts and of these, D and C its
    dispatch and combine. The GPU computes a, a, e, e of the two halves in turn; D of each starts
    when its a is done, C when its e is, and communication runs in the same order.

    Args:
        half: terms of a step with half of the load, those of all layers alone.
        layers: of the model; a is the mean over them.
        on_sms: whether the fixed parts of D and C are on the SMs: they then count to a and e.

    Returns:
        The same terms, twice as long; of dispatch and combine what compute does not hide.

    Source:
        The order of vLLM 0.29.0 model_executor/layers/fused_moe/prepare_finalize (a half yields
        before its dispatch and its combine) and of SGLang 0.5 batch_overlap/operations_strategy.
        Between slots every op waits for both of the slot before, so that the longest path is the
        sum of the longer ones: docs/model.md.

    Ignores:
        Compute that is slower while the network writes to the same memory; shared experts beside a
        combine; layers that differ from the mean one; halves that differ.
    """
    terms = {term.name: term for term in half}

    def per_layer(*names: str, repeats: int) -> NDArray[np.float64]:
        return np.asarray(sum(terms[name].seconds for name in names if name in terms)) / repeats

    exchanged = (DISPATCH, COMBINE)
    own_s = [np.asarray(terms[name].launch_s * on_sms) / expert_layers for name in exchanged]
    names = [name for name in terms if name not in {*exchanged, *EXPERTS}]
    attention_s = per_layer(*names, repeats=layers) + own_s[0]
    experts_s = per_layer(*EXPERTS, repeats=expert_layers) + own_s[1]
    for name, own in zip(exchanged, own_s, strict=True):
        sent_s = per_layer(name, repeats=expert_layers) - own
        beside = sum(np.maximum(0.0, sent_s - each_s) for each_s in (attention_s, experts_s))
        last_s = np.minimum(attention_s, sent_s) if name == COMBINE else 0.0
        terms[name] = _exposed(terms[name], expert_layers * (2 * own + beside) + last_s)
    return tuple(term if term.name in exchanged else term.scaled(2.0) for term in terms.values())


def _exposed(term: Term, seconds: NDArray[np.float64]) -> Term:
    """Return a term of both halves of which only so many seconds are not hidden behind others."""
    whole = 2 * np.where(term.seconds > 0, term.seconds, 1.0)
    left = term.scaled(2 * seconds / whole)
    return replace(left, equation="S11", seconds=seconds, hidden_s=2 * term.seconds - seconds)
