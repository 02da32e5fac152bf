"""A configuration that a fresh seed agrees to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.planner.closed_form import MOST_REPLICAS
from sizing.planner.objective import cost
from sizing.planner.trial import FRESH_SEED

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.answer import Verdict
    from sizing.planner.candidate import Candidate
    from sizing.planner.trial import Trials

SEEDS = (0, FRESH_SEED)
"""Of the run that the search goes by, and of the fresh one that has to agree."""

Confirmed = tuple["Candidate", tuple["Verdict", ...]]
"""A configuration and what each seed said."""


def confirmed(inputs: Inputs, trials: Trials, chosen: Candidate, below: float) -> Confirmed | None:
    """Ask every seed; grow the pool that one blames until all agree, at less cost than *below*."""
    while cost(inputs, chosen) < below:
        verdicts = tuple(trials.verdict(chosen, seed=seed) for seed in SEEDS)
        missed = next((each for each in verdicts if not each.holds), None)
        if missed is None:
            return chosen, verdicts
        if missed.exhausted or max(chosen.replicas.values()) > MOST_REPLICAS:
            return None
        sizes = list(chosen.sizes)
        grown = 0 if missed.blame == "prefill" else 1
        sizes[grown] += max(1, sizes[grown] // 64)
        chosen = chosen.sized(*sizes)
    return None
