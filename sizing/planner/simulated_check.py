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
from sizing.planner.candidates import cost, utilisations
from sizing.planner.deployment import deployment
from sizing.planner.error_model import StepErrors
from sizing.planner.result import PlanVerdict
from sizing.planner.slo import Check
from sizing.simulation.outcome import simulate
from sizing.simulation.planned import deployed_system
from sizing.simulation.system import steady_decoding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from minicluster.specs.workload import WorkloadSpec
    from minicluster.workload.arrivals import Arrivals
    from sizing.planner.candidates import Candidate, Promises
    from sizing.simulation.outcome import Outcome
    from sizing.simulation.system import System

MIN_REQUESTS = 1_500
"""Minimum requests per simulation run; a p99 then rests on 15 requests."""

CLASS_REQUESTS = 600
"""Minimum requests of each of several classes per run; a p99 then rests on 6 requests."""

MAX_REQUESTS = 33_000
"""Maximum requests per simulation run, so that one run takes seconds."""

VERIFY_SEED = 1
"""Seed of the run that verifies a configuration; the search itself uses seed 0."""

VERIFY_REQUESTS = 12_000
"""Requests of a run that decides what a shorter one leaves open, and of a prediction."""

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
"""Replicas of a pool beyond which a search gives up: a bound on its work, not on its time."""

BUDGET_REQUESTS = 1_500_000
"""Simulated requests of one search, all runs together: most of a minute of work."""

REPLICA_SETUP_REQUESTS = 8
"""Cost of setting up one simulated replica, in requests."""

VerifiedSizes = tuple["Candidate", tuple[PlanVerdict, ...]]
"""A configuration and its verdict for each of `SEEDS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloRun:
    """
    What a simulation says of the SLO.

    Attributes:
        limits: every limit with whether it surely holds or is missed; `None`: chance may decide.
        role: the pool that the tightest limit asks for.
    """

    limits: tuple[tuple[Check, bool | None], ...]
    role: str

    @property
    def tightest(self) -> Check:
        """The limit that is used up most."""
        return self.late(StepErrors())

    @property
    def surely_holds(self) -> bool | None:
        """Whether every limit surely holds, or one is surely missed; `None`: chance may decide."""
        sure = [each for _, each in self.limits]
        return False if False in sure else None if None in sure else True

    def late(self, errors: StepErrors) -> Check:
        """Return the tightest limit if latencies are as far off as those measured under load."""
        found = (check.with_errors(errors) for check, _ in self.limits)
        return max(found, key=lambda check: check.ratio)


class Simulations:
    """The simulations of one search: each is made once, and all together have a budget."""

    def __init__(self, inputs: Inputs, *, requests: int = BUDGET_REQUESTS) -> None:
        """Start without any; *inputs* is what every candidate shares, *requests* the budget."""
        self.inputs = inputs
        slos = inputs.scenario.promises.values()
        self._limits_itl = any(each.itl_s is not None for each in slos)
        self._left = requests
        self._systems: dict[Candidate, System] = {}
        self._arrivals: dict[tuple[WorkloadSpec, int, int], Arrivals] = {}
        self._runs: dict[tuple[Candidate, int, int], SloRun] = {}
        self._predicted: dict[Candidate, Outcome] = {}

    def run(self, slow: Candidate, *, requests: int, seed: int) -> SloRun | None:
        """
        Simulate a candidate with the step times that it has, unless that was done before.

        `None` where the budget does not last for it.
        """
        key = slow, requests, seed
        if key not in self._runs:
            share = requests + REPLICA_SETUP_REQUESTS * sum(slow.replicas.values())
            if share > self._left:
                return None
            self._left -= share
            outcome = self.outcome(slow, requests=requests, seed=seed)
            slos = self.inputs.scenario.promises
            limits = tuple(limits_of(outcome, slos))
            tightest = max((check for check, _ in limits), key=lambda check: check.ratio)
            own = outcome.counts & (outcome.class_of == list(slos).index(tightest.of))
            role = _bottleneck_role(slow, outcome, tightest, own)
            self._runs[key] = SloRun(limits=limits, role=role)
        return self._runs[key]

    def predicted(self, candidate: Candidate) -> Outcome:
        """
        Simulate a candidate with step times as predicted: what its prediction is read from.

        The seed is that of no run by which the search chose the candidate.
        """
        count = predicted_requests(candidate, self.inputs.scenario.promises)
        return self.outcome(candidate, requests=count, seed=PREDICTION_SEED)

    def outcome(self, slow: Candidate, *, requests: int, seed: int) -> Outcome:
        """Simulate a candidate with the step times that it has; a prediction is kept."""
        if seed == PREDICTION_SEED and slow in self._predicted:
            return self._predicted[slow]
        tandem = slow.tandem
        key = tandem.workload, requests, seed
        if key not in self._arrivals:
            self._arrivals[key] = drawn(tandem.workload, RequestSource(), count=requests, seed=seed)
        arrivals = self._arrivals[key]
        _, batch = bounds.steady_decode(tandem, split=slow.layout.prefill is not None)
        limit, replicas = tandem.decode.max_batch_size, tandem.decode.replicas
        decoding = steady_decoding(arrivals, int(min(batch, limit) * replicas), seed=seed)
        system = self._system(slow)
        prediction = seed == PREDICTION_SEED
        gaps = prediction or self._limits_itl
        found = simulate(system, arrivals, seed=seed, decoding=decoding, samples=1, gaps=gaps)
        if prediction:
            self._predicted[slow] = found
        return found

    def _system(self, slow: Candidate) -> System:
        """Return what a candidate deploys: as many replicas as it has, of those of the smallest."""
        one = slow.sized(*(min(1, count) for count in slow.sizes))
        if one not in self._systems:
            deployed = deployed_system(deployment(self.inputs, one), one.tandem.step_model)
            self._systems[one] = deployed
        found, tandem = self._systems[one], slow.tandem
        prefill = found.prefill and replace(found.prefill, replicas=tandem.prefill.replicas)
        decode = replace(found.decode, replicas=tandem.decode.replicas)
        return replace(found, prefill=prefill, decode=decode)


class SloSimulator:
    """Verdicts on candidates, with steps that take *errors* times as long as predicted."""

    def __init__(
        self, simulations: Simulations, errors: StepErrors, *, precise: bool = True
    ) -> None:
        """
        Keep what verdicts are made of.

        Args:
            precise: whether a limit must hold beyond chance; else the percentile of one shorter
                run decides.
        """
        self.errors, self.precise = errors, precise
        self.exhausted = False
        self._latency_first = False
        self._simulations, self._slos = simulations, simulations.inputs.scenario.promises

    def verdict(self, candidate: Candidate, *, seed: int = 0) -> PlanVerdict:
        """
        Simulate whether every limit surely holds, or one does not.

        What a run leaves open, though every percentile in it holds, is decided by one of at least
        `VERIFY_REQUESTS` with the verifying seed; what else is open counts as missed
        (docs/model.md, eq. L4).
        """
        slow = candidate.with_errors(self.errors)
        missed = PlanVerdict(holds=False, bottleneck_role=_last_role(candidate), requests=0)
        used = utilisations(slow)
        if max(used.values()) >= 1:
            return replace(missed, bottleneck_role=max(used, key=lambda role: used[role]))
        count = run_requests(slow, self._slos, precise=self.precise)
        verdict = replace(missed, requests=count)
        try:
            if self._latency_first:  # what denied the last candidate may deny this one, too
                denied = self._denied_by_latency(verdict, candidate, seed)
                if denied is not None:
                    return denied
            run = self._simulations.run(slow, requests=count, seed=seed)
            short = self.precise and count < VERIFY_REQUESTS
            # A longer run has to decide; the search's own seed has to hold by itself.
            unsure = run is not None and run.surely_holds is None
            if run and short and unsure and (seed or run.tightest.ratio <= 1):
                verdict, seed = replace(verdict, requests=VERIFY_REQUESTS), VERIFY_SEED
                run = self._simulations.run(slow, requests=VERIFY_REQUESTS, seed=seed)
        except NegativeAnswer:  # requests that preempt one another without end
            return verdict
        if run is None:
            return self._exhausted(verdict)
        holds = bool(run.surely_holds) if self.precise else run.tightest.ratio <= 1
        verdict = replace(verdict, holds=holds, bottleneck_role=run.role, check=run.tightest)
        self._latency_first = self._latency_first and holds
        return self._checked(verdict, run, candidate, seed) if holds else verdict

    def _checked(
        self, verdict: PlanVerdict, slowed: SloRun, candidate: Candidate, seed: int
    ) -> PlanVerdict:
        """Check what holds with slow steps for latencies as far off as those measured."""
        verifying = self.precise and seed != 0  # by the run that the prediction is read from, too
        if not verifying and slowed.late(self.errors).ratio <= 1:
            self._latency_first = False
            return verdict  # steps as predicted are faster still
        denied = self._denied_by_latency(verdict, candidate, seed)
        if denied is None and verifying:
            longer = predicted_requests(candidate, self._slos)
            return replace(verdict, requests=verdict.requests + longer)
        return denied or verdict

    def _denied_by_latency(
        self, verdict: PlanVerdict, candidate: Candidate, seed: int
    ) -> PlanVerdict | None:
        """Deny what misses with latencies as far off as those measured; `None`: it holds."""
        count = verdict.requests
        if seed and self.precise:
            count, seed = predicted_requests(candidate, self._slos), PREDICTION_SEED
        run = self._simulations.run(candidate, requests=count, seed=seed)
        if run is None:
            return self._exhausted(verdict)
        late = run.late(self.errors)
        if late.ratio <= 1:
            return None
        self._latency_first = True
        split = candidate.layout.prefill is not None
        role = "prefill" if split and late.metric == "ttft" else _last_role(candidate)
        role = run.role if late.metric == "e2e" else role
        return replace(verdict, holds=False, bottleneck_role=role, check=late)

    def _exhausted(self, verdict: PlanVerdict) -> PlanVerdict:
        self.exhausted = True
        return replace(verdict, holds=False, exhausted=True)


def run_requests(slow: Candidate, slos: Promises, *, precise: bool) -> int:
    """
    Return the requests of a run, within bounds: a multiple of what the system holds.

    Of each class of requests there are enough to judge its percentile.

    A precise run also lasts for several relaxation times of the prefill queue, in each of
    which about 4 rho / (1 - rho)^2 requests come (docs/model.md, eq. L4).
    """
    tandem = slow.tandem
    full_pace_s = bounds.pace_s(tandem, tandem.decode.max_batch_size)
    stay_s = max(slo.ttft_s for slo in slos.values()) + full_pace_s * float(
        tandem.output_tokens.mean()
    )
    inside = (RUN_STAYS if precise else QUICK_STAYS) * tandem.workload.requests_per_s * stay_s
    if precise:
        rho = min(utilisations(slow).get("prefill", 0.0), 0.99)
        inside = max(inside, RUN_RELAXATIONS * 4 * rho / (1 - rho) ** 2)
    if len(slos) > 1:
        inside = max(inside, CLASS_REQUESTS / tandem.workload.rarest_fraction)
    return int(np.clip(100 * np.ceil(inside / 100), MIN_REQUESTS, MAX_REQUESTS))


def predicted_requests(candidate: Candidate, slos: Promises) -> int:
    """Return the requests of the run that a prediction is read from."""
    return max(run_requests(candidate, slos, precise=True), VERIFY_REQUESTS)


def limits_of(outcome: Outcome, slos: Promises) -> list[tuple[Check, bool | None]]:
    """
    Return every limit with whether it surely holds or is missed; `None`: chance may decide.

    The chance to err is shared by the classes of requests: all hold together as surely as one.
    """
    found: list[tuple[Check, bool | None]] = []
    for at, (of, slo) in enumerate(slos.items()):
        for name, limit_s in slo.limits_s.items():
            values, weights = outcome.series(name, at)
            if not len(values):
                continue
            order, share, claims = np.argsort(values, kind="stable"), slo.level, len(slos)
            mass = np.ones(len(values)) if weights is None else weights
            check = Check(
                metric=name,
                percentile=slo.percentile,
                of=of,
                seconds=weighted_quantile(values[order], share, mass[order]),
                limit_s=limit_s,
            )
            sure: bool | None = None
            if surely_below(values, limit_s, share, weights, claims=claims):
                sure = True
            elif surely_below(-values, -limit_s, 1 - share, weights, claims=claims):
                sure = False
            found.append((check, sure))
    return found


def _bottleneck_role(
    candidate: Candidate, outcome: Outcome, check: Check, own: NDArray[np.bool_]
) -> str:
    """
    Return the pool that a limit asks for: prefill where late requests wait longer for it.

    What a request waits for decode is its queue there; of E2E also what its tokens take longer
    than those of a sequence that decodes alone.

    Args:
        own: requests of the check's class that count.
    """
    if candidate.layout.prefill is None or check.metric not in {"ttft", "e2e"}:
        return _last_role(candidate)
    latency_s = outcome.ttft_s if check.metric == "ttft" else outcome.e2e_s
    late = own & (latency_s >= check.seconds)
    waits = {name: float(part[late].mean()) for name, part in outcome.parts_s.items()}
    decode_s = waits[DECODE_QUEUE]
    if check.metric == "e2e":
        alone_s = bounds.pace_s(candidate.tandem, 1) * (outcome.output_tokens[late] - 1)
        decoding_s = outcome.e2e_s[late] - outcome.ttft_s[late]
        decode_s += max(0.0, float((decoding_s - alone_s).mean()))
    return "prefill" if waits[PREFILL_QUEUE] >= decode_s else "decode"


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
