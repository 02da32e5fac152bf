"""The check of a configuration against the SLO by simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import NegativeAnswer
from minicluster.phases import DECODE_QUEUE, PREFILL_QUEUE
from minicluster.stats.batch_means import surely_below
from minicluster.stats.quantiles import weighted_quantile
from minicluster.workload.sources import RequestSource, drawn
from sizing.planner import bounds
from sizing.planner.configuration import Configuration, cost
from sizing.planner.deployment import deployment
from sizing.planner.edge import SATURATED
from sizing.planner.error_model import AS_PREDICTED, Check, StepErrors
from sizing.planner.step_models import StepModels, utilisations
from sizing.planner.workers import NO_WORKERS, Workers
from sizing.simulation.outcome import Outcome, simulate_system
from sizing.simulation.planned import deployed_system
from sizing.simulation.system import System, steady_decoding

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from minicluster.workload.arrivals import Arrivals
    from sizing.planner.bounds import OfferedLoad
    from sizing.planner.error_model import Promises
    from sizing.planner.step_models import Steps

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """
    The verdict of a simulation on a configuration.

    Attributes:
        holds: whether every limit surely holds.
        bottleneck_role: the pool that a missed limit asks for, or the tightest one where all hold.
        requests: number simulated; zero where a pool is saturated without any queue.
        exhausted: whether the search's simulation budget was used up.
        check: the limit that is used up most, as simulated.
    """

    holds: bool
    bottleneck_role: str
    requests: int
    check: Check | None = None
    exhausted: bool = False

    @property
    def used(self) -> float:
        """Share of the tightest limit that is used up; `SATURATED` where there is no latency."""
        return SATURATED if self.check is None else self.check.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """
    A configuration at the highest rate that it holds, requests/s.

    Attributes:
        binds: limit that is missed first above the rate.
    """

    configuration: Configuration
    rate: float
    binds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """
    The cheapest configuration that holds the SLO.

    Attributes:
        models: steps that it was simulated with.
        predicted: the run that the prediction is read from; `None` until the search is over.
        errors: factors on step times and latencies under which it was simulated.
        verdicts: one per seed; empty where it was not simulated.
        growth: its highest rate; `None`: not looked for yet.
        other: the cheapest of the other kind (split or aggregated), and why it is not the plan.
        interrupted: whether the search was stopped, so that this is the best so far.
    """

    configuration: Configuration
    models: StepModels = field(repr=False, compare=False)
    predicted: Outcome | None = field(default=None, repr=False)
    errors: StepErrors = field(default_factory=StepErrors)
    verdicts: tuple[PlanVerdict, ...] = ()
    growth: Held | None = None
    other: str = ""
    interrupted: bool = False


Verified = tuple["Configuration", tuple[PlanVerdict, ...]]
"""A configuration and its verdict for each of `SEEDS`."""


Made = tuple["SloRun", Outcome | None]
"""A run, and its outcome if a prediction is read from it."""

Runs = dict[object, "SloRun"]
"""Runs by configuration, errors, requests and seed."""


@dataclass(slots=True)
class _Shared:
    """
    What the simulations of one search share at every rate.

    Attributes:
        left: requests that may still be simulated.
    """

    left: int
    workers: Workers = NO_WORKERS
    exhausted: bool = False
    systems: dict[tuple[Configuration, StepErrors], System] = field(default_factory=dict)
    at_rate: dict[float, Simulations] = field(default_factory=dict)

    def spent(self, requests: int) -> bool:
        """Spend so many, if they are left."""
        enough = requests <= self.left
        self.left -= requests if enough else 0
        self.exhausted = self.exhausted or not enough
        return enough


@dataclass(frozen=True, slots=True, kw_only=True)
class SloRun:
    """
    Limits of the SLO in one simulation.

    Attributes:
        limits: every limit with whether it surely holds or is missed; `None`: chance may decide.
        role: the pool that the tightest limit asks for.
    """

    limits: tuple[tuple[Check, bool | None], ...]
    role: str

    @property
    def tightest(self) -> Check:
        """The limit that is used up most."""
        return self.late(AS_PREDICTED)

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

    def __init__(
        self,
        models: StepModels,
        *,
        requests: int = BUDGET_REQUESTS,
        workers: Workers = NO_WORKERS,
        shared: _Shared | None = None,
    ) -> None:
        """
        Start without any.

        Args:
            models: steps under the load.
            requests: budget, where none is *shared* with other rates of the load.
            workers: processes that make runs ahead of time.
        """
        self.models, self.inputs = models, models.inputs
        slos = self.inputs.scenario.promises.values()
        self._limits_itl = any(each.itl_s is not None for each in slos)
        self._shared = shared or _Shared(requests, workers)
        self._ahead: dict[object, Callable[[], Made]] = {}
        self._verifying: Callable[[], Runs] | None = None
        self._arrivals: dict[tuple[int, int], Arrivals] = {}
        self._runs: Runs = {}
        self._predicted: dict[object, Outcome] = {}

    def at_rate(self, requests_per_s: float) -> Simulations:
        """Return simulations of the same configurations at another rate, on the same budget."""
        known = self._shared.at_rate
        if requests_per_s not in known:
            models = self.models.at_rate(requests_per_s)
            known[requests_per_s] = Simulations(models, shared=self._shared)
        return known[requests_per_s]

    @property
    def exhausted(self) -> bool:
        """Whether the budget did not last for a run."""
        return self._shared.exhausted

    def run(
        self, chosen: Configuration, errors: StepErrors, *, requests: int, seed: int
    ) -> SloRun | None:
        """
        Simulate a configuration with steps so much slower, unless that was done before.

        `None` where the budget does not last for it.
        """
        key = chosen, errors.prefill, errors.decode, requests, seed
        if key not in self._runs:
            share = requests + REPLICA_SETUP_REQUESTS * sum(chosen.replicas.values())
            if not self._shared.spent(share):
                return None
            made = self._made_ahead(key) or partial(
                self.judged, chosen, errors, requests=requests, seed=seed
            )
            self._runs[key], outcome = made()
            if outcome is not None:
                self._predicted[chosen, errors, 1] = outcome
        return self._runs[key]

    def judged(
        self, chosen: Configuration, errors: StepErrors, *, requests: int, seed: int
    ) -> Made:
        """Simulate a configuration; of a prediction's run return the outcome, too."""
        outcome = self.outcome(chosen, errors, requests=requests, seed=seed)
        slos = self.inputs.scenario.promises
        limits = tuple(limits_of(outcome, slos))
        tightest = max((check for check, _ in limits), key=lambda check: check.ratio)
        own = outcome.counts & (outcome.class_of == list(slos).index(tightest.of))
        load = self.models.load(chosen, errors)
        role = _bottleneck_role(chosen, load, outcome, tightest, own)
        return SloRun(limits=limits, role=role), outcome if seed == PREDICTION_SEED else None

    def _made_ahead(self, key: object) -> Callable[[], Made] | None:
        if self._verifying is not None:
            runs, self._verifying = self._verifying(), None
            self._ahead |= {at: partial(_as_made, run) for at, run in runs.items()}
        return self._ahead.pop(key, None)

    def verify_ahead(self, chosen: Configuration, errors: StepErrors) -> None:
        """Let a free worker make the runs that verify a configuration, as far as it holds."""
        workers = self._shared.workers
        if workers.free and self._verifying is None:
            steps = self.models.known(chosen)
            self._verifying = workers.later(_verifying_runs, self.inputs, steps, chosen, errors)

    def _predict_ahead(self, chosen: Configuration, *, needed: bool) -> None:
        """Let a free worker make a prediction's run, which what holds is verified by, too."""
        workers, requests = self._shared.workers, self.prediction_requests(chosen)
        key = chosen, AS_PREDICTED.prefill, AS_PREDICTED.decode, requests, PREDICTION_SEED
        if needed and workers.free and key not in self._runs and key not in self._ahead:
            steps = self.models.known(chosen)
            self._ahead[key] = workers.later(
                _judged, self.inputs, steps, chosen, AS_PREDICTED, requests, PREDICTION_SEED
            )

    @property
    def runs(self) -> Runs:
        """The runs so far at this rate; those of other simulations of the load may be added."""
        return self._runs

    def predicted(
        self, chosen: Configuration, errors: StepErrors = AS_PREDICTED, *, samples: int = 1
    ) -> Outcome:
        """
        Simulate the run that a configuration's prediction is read from, or slower steps in it.

        The seed is that of no run by which the search chose it.
        """
        count = self.prediction_requests(chosen)
        return self.outcome(chosen, errors, requests=count, seed=PREDICTION_SEED, samples=samples)

    def outcome(
        self,
        chosen: Configuration,
        errors: StepErrors,
        *,
        requests: int,
        seed: int,
        samples: int = 1,
    ) -> Outcome:
        """
        Simulate a configuration with steps so much slower; a prediction's run is kept.

        Args:
            samples: most samples of queues and caches over time.
        """
        prediction = seed == PREDICTION_SEED
        if prediction and (chosen, errors, samples) in self._predicted:
            return self._predicted[chosen, errors, samples]
        if (requests, seed) not in self._arrivals:
            workload = self.inputs.scenario.workload
            coming = drawn(workload, RequestSource(), count=requests, seed=seed)
            self._arrivals[requests, seed] = coming
        arrivals = self._arrivals[requests, seed]
        load, lanes = self.models.load(chosen, errors), chosen.lanes(chosen.last)
        _, batch = bounds.steady_decode(load, lanes)
        decoding = steady_decoding(arrivals, int(min(batch, chosen.batch_limit) * lanes), seed=seed)
        system = self._system(chosen, errors)
        gaps = prediction or self._limits_itl
        found = simulate_system(
            system, arrivals, seed=seed, decoding=decoding, samples=samples, gaps=gaps
        )
        if prediction:
            self._predicted[chosen, errors, samples] = found
        return found

    def _system(self, chosen: Configuration, errors: StepErrors) -> System:
        """Return what a configuration deploys: its replicas of the smallest's pools."""
        one = chosen.smallest
        systems = self._shared.systems
        if (one, errors) not in systems:
            model = self.models.load(one, errors).step_model
            systems[one, errors] = deployed_system(deployment(self.inputs, one), model)
        found = systems[one, errors]
        prefill = found.prefill and replace(found.prefill, replicas=chosen.lanes("prefill"))
        decode = replace(found.decode, replicas=chosen.lanes(chosen.last))
        return replace(found, prefill=prefill, decode=decode)

    def holds(
        self, chosen: Configuration, errors: StepErrors, *, seed: int = 0, quick: bool = False
    ) -> PlanVerdict:
        """
        Simulate whether every limit surely holds with errors so large, or one does not.

        What a run leaves open, though every percentile in it holds, is decided by one of at least
        `VERIFY_REQUESTS` with the verifying seed; what else is open counts as missed
        (docs/model.md, eq. L4). What holds with slow steps has to hold with latencies as far off as
        those measured, too.

        Args:
            quick: whether the percentile of one shorter run decides; else a limit must hold
                beyond chance.
        """
        missed = PlanVerdict(holds=False, bottleneck_role=chosen.last, requests=0)
        used = utilisations(self.models, chosen, errors)
        if max(used.values()) >= 1:
            return replace(missed, bottleneck_role=max(used, key=lambda role: used[role]))
        count = self.run_requests(chosen, errors, quick=quick)
        verdict = replace(missed, requests=count)
        self._predict_ahead(chosen, needed=seed != 0 and not quick)
        try:
            run = self.run(chosen, errors, requests=count, seed=seed)
            short = not quick and count < VERIFY_REQUESTS
            # A longer run has to decide; the search's own seed has to hold by itself.
            unsure = run is not None and run.surely_holds is None
            if run and short and unsure and (seed or run.tightest.ratio <= 1):
                seed, verdict = VERIFY_SEED, replace(verdict, requests=VERIFY_REQUESTS)
                run = self.run(chosen, errors, requests=VERIFY_REQUESTS, seed=seed)
        except NegativeAnswer:  # requests that preempt one another without end
            return verdict
        if run is None:
            return replace(verdict, exhausted=True)
        holds = run.tightest.ratio <= 1 if quick else bool(run.surely_holds)
        verdict = replace(verdict, holds=holds, bottleneck_role=run.role, check=run.tightest)
        verifying = seed != 0 and not quick  # by the run that the prediction is read from, too
        if not holds or (not verifying and run.late(errors).ratio <= 1):
            return verdict  # steps as predicted are faster still
        if verifying:
            count, seed = self.prediction_requests(chosen), PREDICTION_SEED
        late = self._late(chosen, errors, requests=count, seed=seed)
        if late is None:
            return replace(verdict, requests=verdict.requests + count * verifying)
        return replace(late, requests=verdict.requests, check=late.check or verdict.check)

    def _late(
        self, chosen: Configuration, errors: StepErrors, *, requests: int, seed: int
    ) -> PlanVerdict | None:
        """Deny what misses with latencies as far off as those measured; `None`: it holds."""
        run = self.run(chosen, AS_PREDICTED, requests=requests, seed=seed)
        missed = PlanVerdict(holds=False, bottleneck_role=chosen.last, requests=requests)
        if run is None:
            return replace(missed, exhausted=True)
        late = run.late(errors)
        if late.ratio <= 1:
            return None
        role = "prefill" if late.metric == "ttft" and chosen.last == "decode" else chosen.last
        role = run.role if late.metric == "e2e" else role
        return replace(missed, bottleneck_role=role, check=late)

    def run_requests(self, chosen: Configuration, errors: StepErrors, *, quick: bool) -> int:
        """
        Return the requests of a run, within bounds: a multiple of what the system holds.

        Of each class of requests there are enough to judge its percentile.

        A precise run also lasts for several relaxation times of the prefill queue, in each of
        which about 4 rho / (1 - rho)^2 requests come (docs/model.md, eq. L4).
        """
        load, slos = self.models.load(chosen, errors), self.inputs.scenario.promises
        full_pace_s = bounds.pace_s(load, chosen.batch_limit)
        stay_s = max(slo.ttft_s for slo in slos.values()) + full_pace_s * float(
            load.output_tokens.mean()
        )
        inside = (QUICK_STAYS if quick else RUN_STAYS) * load.workload.requests_per_s * stay_s
        if not quick:
            rho = min(utilisations(self.models, chosen, errors).get("prefill", 0.0), 0.99)
            inside = max(inside, RUN_RELAXATIONS * 4 * rho / (1 - rho) ** 2)
        if len(slos) > 1:
            inside = max(inside, CLASS_REQUESTS / load.workload.rarest_fraction)
        return int(np.clip(100 * np.ceil(inside / 100), MIN_REQUESTS, MAX_REQUESTS))

    def prediction_requests(self, chosen: Configuration) -> int:
        """Return the requests of the run that a prediction is read from."""
        return max(self.run_requests(chosen, AS_PREDICTED, quick=False), VERIFY_REQUESTS)


def _as_made(run: SloRun) -> Made:
    return run, None


def _verifying_runs(
    inputs: Inputs, steps: Steps, chosen: Configuration, errors: StepErrors
) -> Runs:
    simulations = Simulations(StepModels(inputs, steps))
    under_seeds(simulations, chosen, errors)
    return simulations.runs


def _judged(
    inputs: Inputs,
    steps: Steps,
    chosen: Configuration,
    errors: StepErrors,
    requests: int,
    seed: int,
) -> Made:
    simulations = Simulations(StepModels(inputs, steps))
    return simulations.judged(chosen, errors, requests=requests, seed=seed)


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
    chosen: Configuration,
    load: OfferedLoad,
    outcome: Outcome,
    check: Check,
    own: NDArray[np.bool_],
) -> str:
    """
    Return the pool that a limit asks for: prefill where late requests wait longer for it.

    What a request waits for decode is its queue there; of E2E also what its tokens take longer
    than those of a sequence that decodes alone.

    Args:
        own: requests of the check's class that count.
    """
    if not load.split or check.metric not in {"ttft", "e2e"}:
        return chosen.last
    latency_s = outcome.ttft_s if check.metric == "ttft" else outcome.e2e_s
    late = own & (latency_s >= check.seconds)
    waits = {name: float(part[late].mean()) for name, part in outcome.parts_s.items()}
    decode_s = waits[DECODE_QUEUE]
    if check.metric == "e2e":
        alone_s = bounds.pace_s(load, 1) * (outcome.output_tokens[late] - 1)
        decoding_s = outcome.e2e_s[late] - outcome.ttft_s[late]
        decode_s += max(0.0, float((decoding_s - alone_s).mean()))
    return "prefill" if waits[PREFILL_QUEUE] >= decode_s else "decode"


def under_seeds(
    simulations: Simulations, chosen: Configuration, errors: StepErrors
) -> tuple[PlanVerdict, ...]:
    """Return the verdict under each of `SEEDS` up to the first that misses."""
    verdicts: tuple[PlanVerdict, ...] = ()
    for seed in SEEDS:
        verdicts += (simulations.holds(chosen, errors, seed=seed),)
        if not verdicts[-1].holds:
            break
    return verdicts


def verified(
    simulations: Simulations, chosen: Configuration, errors: StepErrors, below: float
) -> Verified | None:
    """
    Grow the bottleneck pool until the SLO holds under every seed.

    Returns:
        The configuration and its verdicts; `None` where it would cost *below* or more.
    """
    while cost(simulations.inputs, chosen) < below:
        verdicts = under_seeds(simulations, chosen, errors)
        missed = verdicts[-1]
        if missed.holds:
            return chosen, verdicts
        if missed.exhausted or max(chosen.replicas.values()) > MAX_REPLICAS:
            return None
        role = missed.bottleneck_role
        count = chosen.replicas[role]
        chosen = chosen.sized({role: count + max(1, count // 64)})
    return None
