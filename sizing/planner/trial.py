"""Does a configuration hold the SLO when it is simulated?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import NegativeAnswer
from minicluster.stats.batch_means import surely_below
from minicluster.stats.quantiles import weighted_quantile
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner.answer import PlanVerdict
from sizing.planner.closed_form import MOST_REPLICAS
from sizing.planner.deployment import deployment
from sizing.planner.objective import cost
from sizing.planner.slo import Check, checks, meets, under_load
from sizing.queueing import decode, prefill
from sizing.queueing.forecast import forecast
from sizing.simulation.outcome import simulate
from sizing.simulation.planned import deployed_system

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from minicluster.specs.slo import SloSpec
    from minicluster.workload.arrivals import Arrivals
    from sizing.planner.candidate import Candidate
    from sizing.planner.evidence import StepErrors
    from sizing.simulation.outcome import Outcome

FEWEST_REQUESTS = 1_500
"""Of a run: half of the 15 requests that may miss a p99 decide."""

FRESH_SEED = 1
"""Of the run that proves."""

PROVING_REQUESTS = 12_000
"""Of a run with a fresh seed: the search chose what does well on the first one, luck included."""

MOST_REQUESTS = 33_000
"""Of one run."""

STAYS = 3
"""Times that a run is longer than a request, so that pools fill and settle."""

SHORT_STAYS = 2
"""The same where a look is enough."""

LONG_QUEUES = 0.9
"""Utilisation of a prefill pool from which on closed forms have to agree."""

BUDGET_REQUESTS = 1_500_000
"""Simulated requests of one search, all runs together: most of a minute of work."""

PER_REPLICA = 8
"""Requests that setting up one replica takes as long as."""

SEEDS = (0, FRESH_SEED)
"""Of the run that the search goes by, and of the fresh one that has to agree."""

Confirmed = tuple["Candidate", tuple[PlanVerdict, ...]]
"""A configuration and what each seed said."""


@dataclass(slots=True)
class SimulationBudget:
    """Simulated requests that are left; runs take theirs off."""

    left: int = BUDGET_REQUESTS

    def take(self, requests: int, replicas: int) -> bool:
        """Take a run's share off; `False`, and nothing taken, where it is more than is left."""
        share = requests + PER_REPLICA * replicas
        if share > self.left:
            return False
        self.left -= share
        return True


class Trials:
    """Simulations of one scenario with steps that take *errors* times as long."""

    def __init__(
        self,
        inputs: Inputs,
        errors: StepErrors,
        *,
        patient: bool = True,
        work: SimulationBudget | None = None,
    ) -> None:
        """
        Start without any run.

        Args:
            inputs: what every candidate shares.
            errors: of step times.
            patient: else the first look's own percentile decides.
            work: what is left of the search's; one of its own if `None`.
        """
        self._inputs = inputs
        self._work = SimulationBudget() if work is None else work
        self.patient = patient
        self.exhausted = False
        self.errors = errors
        self._arrivals: dict[tuple[int, int], Arrivals] = {}
        self._known: dict[tuple[str, int, int], PlanVerdict] = {}

    def verdict(self, candidate: Candidate, *, seed: int = 0) -> PlanVerdict:
        """
        Simulate until every limit surely holds, or one does not.

        What a first run leaves open the one that has to prove it anyway decides, with a fresh seed
        and longer; what is open then counts as missed (docs/model.md, eq. L4).
        """
        key = (str(candidate), candidate.tandem.decode.max_batch_size, seed)
        if key not in self._known:
            self._known[key] = self._judged(candidate, seed)
        return self._known[key]

    def _judged(self, candidate: Candidate, seed: int) -> PlanVerdict:
        """Run once; on the first seed also ask the fresh one, if chance may decide."""
        slow = candidate.off_by(self.errors)
        verdict = PlanVerdict(holds=False, blame=_last_role(candidate), requests=0, exhausted=True)
        if self._queues_for_long(slow):
            return PlanVerdict(holds=False, blame="prefill", requests=0)
        count = self.length(slow)
        if seed and self.patient:
            count = max(count, PROVING_REQUESTS)
        if not self._work.take(count, sum(candidate.replicas.values())):
            self.exhausted = True
            return verdict
        try:
            outcome = self.outcome(slow, requests=count, seed=seed)
        except NegativeAnswer:  # requests that preempt one another without end
            return replace(verdict, requests=count, exhausted=False)
        sure, check = judge(outcome, self._inputs)
        if sure is None and self.patient and not seed and count < PROVING_REQUESTS:
            return self.verdict(candidate, seed=FRESH_SEED)
        holds = sure if self.patient else check.ratio <= 1
        blame = "" if holds else _blame(candidate, outcome, check)
        verdict = PlanVerdict(holds=holds is True, blame=blame, requests=count, check=check)
        return self._late(verdict, candidate, seed) if verdict.holds else verdict

    def _late(self, verdict: PlanVerdict, candidate: Candidate, seed: int) -> PlanVerdict:
        """
        Deny what holds with slow steps, but not with latencies off as those of loads were.

        By closed forms; pools that do both, which have none, are simulated once it counts.
        """
        slo = self._inputs.scenario.slo
        if candidate.layout.prefill is not None:
            predicted = forecast(candidate.tandem)
            found = () if predicted is None else checks(predicted, slo)
        elif seed and self.patient:
            outcome = self.outcome(candidate, requests=verdict.requests, seed=seed)
            found = tuple(check for check, _ in limits_of(outcome, slo))
        else:
            found = ()
        late = under_load(found, self.errors) if found else None
        if late is None or late.ratio <= 1:
            return verdict
        first = candidate.layout.prefill is not None and late.name.startswith("TTFT")
        blame = "prefill" if first else _last_role(candidate)
        return replace(verdict, holds=False, blame=blame, check=late)

    def _queues_for_long(self, slow: Candidate) -> bool:
        """
        Say whether closed forms deny a prefill pool that is nearly saturated.

        Its queue remembers thousands of requests: a run that meets no bad spell proves nothing.
        """
        if slow.layout.prefill is None or prefill.utilisation(slow.tandem) <= LONG_QUEUES:
            return False
        return not meets(forecast(slow.tandem), self._inputs.scenario.slo)

    def outcome(self, slow: Candidate, *, requests: int, seed: int) -> Outcome:
        """Simulate as it stands."""
        if (requests, seed) not in self._arrivals:
            load = self._inputs.scenario.workload
            self._arrivals[requests, seed] = drawn(load, RequestSource(), count=requests, seed=seed)
        system = deployed_system(deployment(self._inputs, slow), slow.tandem.step_model)
        return simulate(system, self._arrivals[requests, seed], seed=seed)

    def length(self, slow: Candidate) -> int:
        """Requests of a run: several times as many as the system holds, bounded."""
        load, tandem = self._inputs.scenario.workload, slow.tandem
        full = float(decode.step_s(tandem, float(tandem.decode.max_batch_size)))
        stay_s = self._inputs.scenario.slo.ttft_s + full * float(tandem.output_tokens.mean())
        inside = (STAYS if self.patient else SHORT_STAYS) * load.requests_per_s * stay_s
        return int(np.clip(100 * np.ceil(inside / 100), FEWEST_REQUESTS, MOST_REQUESTS))


def judge(outcome: Outcome, inputs: Inputs) -> tuple[bool | None, Check]:
    """
    Say whether every limit holds beyond chance, one is missed beyond chance, or neither.

    Returns:
        The answer, and the limit that is used up most.
    """
    found = limits_of(outcome, inputs.scenario.slo)
    worst = max((check for check, _ in found), key=lambda check: check.ratio)
    answers = [answer for _, answer in found]
    if False in answers:
        return False, worst
    return (None if None in answers else True), worst


def limits_of(outcome: Outcome, slo: SloSpec) -> list[tuple[Check, bool | None]]:
    """Compare a run with every limit; whether it holds, is missed, or chance may decide."""
    share = slo.level
    found: list[tuple[Check, bool | None]] = []
    for name, limit_s in slo.limits_s.items():
        values, weights = outcome.series(name)
        if len(values):
            check = Check(
                name=f"{name.upper()} {slo.percentile}",
                seconds=_percentile(values, weights, share),
                limit_s=limit_s,
            )
            found.append((check, _sure(values, weights, limit_s, share)))
    return found


def _sure(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None, limit_s: float, share: float
) -> bool | None:
    """Say whether a limit holds or is missed at a percentile; `None` if chance may decide."""
    if surely_below(values, limit_s, share, weights):
        return True
    return False if surely_below(-values, -limit_s, 1 - share, weights) else None


def _percentile(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None, share: float
) -> float:
    """Read a percentile off."""
    order = np.argsort(values, kind="stable")
    mass = np.ones(len(values)) if weights is None else weights
    return weighted_quantile(values[order], share, mass[order])


def _blame(candidate: Candidate, outcome: Outcome, check: Check) -> str:
    """Name the pool that has to grow: prefill where requests wait longer for it than for decode."""
    if candidate.layout.prefill is None:
        return "mixed"
    counted = {name: float(part[outcome.counts].mean()) for name, part in outcome.parts_s.items()}
    if check.name.startswith("TTFT") and counted["queue"] >= counted["decode admission"]:
        return "prefill"
    return "decode"


def _last_role(candidate: Candidate) -> str:
    """Name the pool where requests end."""
    return "mixed" if candidate.layout.prefill is None else "decode"


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
