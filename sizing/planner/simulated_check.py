"""The check of a configuration against the SLO by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import NegativeAnswer
from minicluster.phases import DECODE_QUEUE, PREFILL_QUEUE
from minicluster.stats.batch_means import surely_below
from minicluster.stats.quantiles import weighted_quantile
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner import bounds
from sizing.planner.candidates import utilisations
from sizing.planner.deployment import deployment
from sizing.planner.objective import cost
from sizing.planner.result import PlanVerdict
from sizing.planner.slo import Check
from sizing.simulation.outcome import simulate
from sizing.simulation.planned import deployed_system
from sizing.simulation.system import steady_decoding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from minicluster.specs.slo import SloSpec
    from minicluster.workload.arrivals import Arrivals
    from sizing.planner.candidates import Candidate
    from sizing.planner.error_model import StepErrors
    from sizing.simulation.outcome import Outcome

MIN_REQUESTS = 1_500
"""Minimum requests per simulation run; a p99 then rests on 15 requests."""

MAX_REQUESTS = 33_000
"""Maximum requests per simulation run, so that one run takes seconds."""

VERIFY_SEED = 1
"""Seed of the run that verifies a configuration; the search itself uses seed 0."""

VERIFY_REQUESTS = 12_000
"""Requests of the verifying run: the search chose what does well on its own seed, luck included."""

PREDICTION_SEED = 2
"""Seed of the run that a prediction is read from."""

SEEDS = (0, VERIFY_SEED)
"""Seeds under which a configuration must hold: the search's own and the verifying one."""

RUN_STAYS = 2
"""
Length of a precise run in stays of a request in full batches, so that pools fill and settle; at
the loads of a plan batches are not full, and a request stays for about two thirds of that.
"""

QUICK_STAYS = 0.7
"""Length of a quick run in stays of a request in full batches."""

RUN_RELAXATIONS = 5
"""
Length of a precise run in relaxation times of the prefill queue. The state of a nearly saturated
queue lasts for thousands of requests: a run without a burst in it proves nothing.
"""

MAX_REPLICAS = 1 << 14
"""Replicas of a pool beyond which no further one is tried."""

BUDGET_REQUESTS = 1_500_000
"""Simulated requests of one search, all runs together: most of a minute of work."""

REPLICA_SETUP_REQUESTS = 8
"""Cost of setting up one simulated replica, in requests."""

VerifiedSizes = tuple["Candidate", tuple[PlanVerdict, ...]]
"""A configuration and its verdict for each of `SEEDS`."""


@dataclass(slots=True)
class SimulationBudget:
    """Simulated requests that a search has left; every run takes its share."""

    left: int = BUDGET_REQUESTS

    def take(self, requests: int, replicas: int) -> bool:
        """Take the share of a run; return `False`, and take nothing, where less is left."""
        share = requests + REPLICA_SETUP_REQUESTS * replicas
        if share > self.left:
            return False
        self.left -= share
        return True


class SloSimulator:
    """Simulations of one scenario with steps that take *errors* times as long as predicted."""

    def __init__(
        self,
        inputs: Inputs,
        errors: StepErrors,
        *,
        precise: bool = True,
        budget: SimulationBudget | None = None,
    ) -> None:
        """
        Start without any run.

        Args:
            inputs: what every candidate shares.
            errors: factors on step times and latencies.
            precise: whether a limit must hold beyond chance; else the percentile of one shorter
                run decides.
            budget: the search's; a full one if `None`.
        """
        self._inputs = inputs
        self._budget = SimulationBudget() if budget is None else budget
        self.precise = precise
        self.exhausted = False
        self.errors = errors
        self._arrivals: dict[tuple[int, int], Arrivals] = {}
        self._verdicts: dict[tuple[str, int, int, int], PlanVerdict] = {}
        self._predicted: dict[tuple[str, int, int], Outcome] = {}

    def verdict(self, candidate: Candidate, *, seed: int = 0) -> PlanVerdict:
        """
        Simulate whether every limit surely holds, or one does not.

        What a short run leaves open is decided by the verifying run, which is longer and has
        another seed; what is open then counts as missed (docs/model.md, eq. L4).
        """
        key = (*_key(candidate), seed)
        if key not in self._verdicts:
            self._verdicts[key] = self._judged(candidate, seed)
        return self._verdicts[key]

    def _judged(self, candidate: Candidate, seed: int) -> PlanVerdict:
        slow = candidate.with_errors(self.errors)
        missed = PlanVerdict(holds=False, bottleneck_role=_last_role(candidate), requests=0)
        used = utilisations(slow)
        if max(used.values()) >= 1:
            return replace(missed, bottleneck_role=max(used, key=lambda role: used[role]))
        count = self.length(slow)
        if seed and self.precise:
            count = max(count, VERIFY_REQUESTS)
        if not self._budget.take(count, sum(candidate.replicas.values())):
            self.exhausted = True
            return replace(missed, exhausted=True)
        try:
            outcome = self.outcome(slow, requests=count, seed=seed)
        except NegativeAnswer:  # requests that preempt one another without end
            return replace(missed, requests=count)
        sure, check = judge(outcome, self._inputs)
        if sure is None and self.precise and not seed and count < VERIFY_REQUESTS:
            return self.verdict(candidate, seed=VERIFY_SEED)
        holds = sure if self.precise else check.ratio <= 1
        role = "" if holds else _bottleneck_role(candidate, outcome, check)
        verdict = PlanVerdict(
            holds=holds is True, bottleneck_role=role, requests=count, check=check
        )
        return self._with_latency_errors(verdict, outcome, candidate, seed) if holds else verdict

    def _with_latency_errors(
        self, verdict: PlanVerdict, slowed: Outcome, candidate: Candidate, seed: int
    ) -> PlanVerdict:
        """Deny what holds with slow steps, but not with latencies as far off as measured."""
        slo = self._inputs.scenario.slo
        if _latest(slowed, slo, self.errors).ratio <= 1:  # steps as predicted are faster still
            return verdict
        if seed and self.precise:
            outcome = self.predicted(candidate)
        else:
            outcome = self.outcome(candidate, requests=verdict.requests, seed=seed)
        late = _latest(outcome, slo, self.errors)
        if late.ratio <= 1:
            return verdict
        split = candidate.layout.prefill is not None
        role = "prefill" if split and late.name.startswith("TTFT") else _last_role(candidate)
        return replace(verdict, holds=False, bottleneck_role=role, check=late)

    def predicted(self, candidate: Candidate) -> Outcome:
        """
        Simulate a candidate with step times as predicted: what its prediction is read from.

        The seed is that of no run by which the search chose the candidate.
        """
        key = _key(candidate)
        if key not in self._predicted:
            count = max(self.length(candidate), VERIFY_REQUESTS)
            self._predicted[key] = self.outcome(candidate, requests=count, seed=PREDICTION_SEED)
        return self._predicted[key]

    def outcome(self, slow: Candidate, *, requests: int, seed: int) -> Outcome:
        """Simulate a candidate with the step times that it has."""
        if (requests, seed) not in self._arrivals:
            load = self._inputs.scenario.workload
            self._arrivals[requests, seed] = drawn(load, RequestSource(), count=requests, seed=seed)
        arrivals = self._arrivals[requests, seed]
        system = deployed_system(deployment(self._inputs, slow), slow.tandem.step_model)
        _, batch = bounds.steady_decode(slow.tandem, split=slow.layout.prefill is not None)
        limit, replicas = slow.tandem.decode.max_batch_size, slow.tandem.decode.replicas
        decoding = steady_decoding(arrivals, int(min(batch, limit) * replicas), seed=seed)
        return simulate(system, arrivals, seed=seed, decoding=decoding, samples=1)

    def length(self, slow: Candidate) -> int:
        """
        Return the requests of a run, within bounds: a multiple of what the system holds.

        A precise run also lasts for several relaxation times of the prefill queue, in each of
        which about 4 rho / (1 - rho)^2 requests come (docs/model.md, eq. L4).
        """
        load, tandem = self._inputs.scenario.workload, slow.tandem
        full_step_s = bounds.decode_step_s(tandem, tandem.decode.max_batch_size)
        stay_s = self._inputs.scenario.slo.ttft_s
        stay_s += full_step_s * float(tandem.output_tokens.mean())
        inside = (RUN_STAYS if self.precise else QUICK_STAYS) * load.requests_per_s * stay_s
        rho = min(utilisations(slow).get("prefill", 0.0), 0.99)
        if self.precise:
            inside = max(inside, RUN_RELAXATIONS * 4 * rho / (1 - rho) ** 2)
        return int(np.clip(100 * np.ceil(inside / 100), MIN_REQUESTS, MAX_REQUESTS))


def _key(candidate: Candidate) -> tuple[str, int, int]:
    tandem = candidate.tandem
    return str(candidate), tandem.decode.max_batch_size, tandem.local_threshold_tokens


def judge(outcome: Outcome, inputs: Inputs) -> tuple[bool | None, Check]:
    """
    Compare a run with the SLO, sampling error included.

    Returns:
        `True` where every limit surely holds, `False` where one is surely missed, else `None`;
        and the limit that is used up most.
    """
    found = limits_of(outcome, inputs.scenario.slo)
    worst = max((check for check, _ in found), key=lambda check: check.ratio)
    sure = [holds for _, holds in found]
    if False in sure:
        return False, worst
    return (None if None in sure else True), worst


def limits_of(outcome: Outcome, slo: SloSpec) -> list[tuple[Check, bool | None]]:
    """Return every limit with whether it surely holds or is missed; `None`: chance may decide."""
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


def _latest(outcome: Outcome, slo: SloSpec, errors: StepErrors) -> Check:
    """Return the tightest limit if latencies are as far off as those measured under load."""
    found = (check.with_errors(errors) for check, _ in limits_of(outcome, slo))
    return max(found, key=lambda check: check.ratio)


def _sure(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None, limit_s: float, share: float
) -> bool | None:
    """Return whether a limit holds at a percentile; `None` if chance may decide."""
    if surely_below(values, limit_s, share, weights):
        return True
    return False if surely_below(-values, -limit_s, 1 - share, weights) else None


def _percentile(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None, share: float
) -> float:
    order = np.argsort(values, kind="stable")
    mass = np.ones(len(values)) if weights is None else weights
    return weighted_quantile(values[order], share, mass[order])


def _bottleneck_role(candidate: Candidate, outcome: Outcome, check: Check) -> str:
    """Return the pool that has to grow: prefill where requests wait longer for it."""
    if candidate.layout.prefill is None:
        return "mixed"
    counted = {name: float(part[outcome.counts].mean()) for name, part in outcome.parts_s.items()}
    if check.name.startswith("TTFT") and counted[PREFILL_QUEUE] >= counted[DECODE_QUEUE]:
        return "prefill"
    return "decode"


def _last_role(candidate: Candidate) -> str:
    return "mixed" if candidate.layout.prefill is None else "decode"


def verify_sizes(
    inputs: Inputs, simulator: SloSimulator, chosen: Candidate, below: float
) -> VerifiedSizes | None:
    """
    Grow the bottleneck pool until the SLO holds under every seed.

    Returns:
        The sizes and their verdicts; `None` where they would cost *below* or more.
    """
    while cost(inputs, chosen) < below:
        verdicts = tuple(simulator.verdict(chosen, seed=seed) for seed in SEEDS)
        missed = next((each for each in verdicts if not each.holds), None)
        if missed is None:
            return chosen, verdicts
        if missed.exhausted or max(chosen.replicas.values()) > MAX_REPLICAS:
            return None
        sizes = list(chosen.sizes)
        grown = 0 if missed.bottleneck_role == "prefill" else 1
        sizes[grown] += max(1, sizes[grown] // 64)
        chosen = chosen.sized(*sizes)
    return None
