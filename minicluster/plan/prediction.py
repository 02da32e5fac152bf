"""What a plan promises, what it costs, and how much stands behind the promise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.specs.checks import NotNegative, Spec
from minicluster.specs.step import Interference, PathCoefficients, StepSpec

if TYPE_CHECKING:
    from minicluster.specs.calibration import CalibrationSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel(Spec):
    """Step times per pool and what lies between them."""

    prefill: StepSpec
    decode: StepSpec
    path: PathCoefficients
    interference: Interference

    @classmethod
    def calibrated(cls, found: CalibrationSpec) -> StepModel:
        """Return the model of a machine that was measured."""
        return cls(
            prefill=found.prefill,
            decode=found.decode,
            path=found.path,
            interference=found.interference,
        )

    def of(self, role: str) -> StepSpec:
        """Return the step of a pool; a mixed one's is that of decode."""
        return self.prefill if role == "prefill" else self.decode

    def slowed(self, *, prefill: float, decode: float, mixed: bool) -> StepModel:
        """
        Return the model with steps that take longer.

        Args:
            mixed: one pool does both: its step holds prompts, whose part grows by *prefill*.
        """
        return replace(
            self,
            prefill=self.prefill.scaled(prefill),
            decode=self.decode.slowed(prompts=prefill if mixed else decode, decode=decode),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency(Spec):
    """
    One latency at every statistic.

    Attributes:
        low_factor: 80 % of measurements like this lay between this and `high_factor` times the
            prediction; `None`: no measurement says how far off it may be.
    """

    mean_s: NotNegative
    p50_s: NotNegative
    p90_s: float
    p95_s: float
    p99_s: NotNegative
    low_factor: float | None = None
    high_factor: float | None = None

    def _check(self) -> None:
        if not self.p50_s <= self.p90_s <= self.p95_s <= self.p99_s:
            raise InputError("prediction", "percentiles", "p50 <= p90 <= p95 <= p99")

    def at(self, statistic: str) -> float:
        """Return one statistic, named as in `PERCENTILES`."""
        value: float = getattr(self, f"{statistic}_s")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPrediction(Spec):
    """Latencies of one class of requests."""

    ttft: Latency
    tpot: Latency
    e2e: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Spec, Shown):
    """
    What the plan promises.

    Attributes:
        output_tokens_per_s: the workload's rate times its mean answer, for readers of the file that
            have no lengths to average.
        capacity_requests_per_s: rate at which the first pool saturates.
        utilisation_fraction: per role, share of the pool's capacity in use at the planned rate
            (prefill: its busy share; decode: full batches count as 1).
        bottleneck: per role, `compute`, `memory bandwidth`, `capacity`, `network` or `queue`.
        ttft_parts_s: mean TTFT by phase (`minicluster.phases`); they add up to `ttft.mean_s`.
        by_class: latencies of each class of requests; the others are of all requests.
    """

    ttft: Latency
    tpot: Latency
    itl: Latency
    e2e: Latency
    output_tokens_per_s: float
    capacity_requests_per_s: float
    utilisation_fraction: dict[str, float]
    bottleneck: dict[str, str]
    ttft_parts_s: dict[str, float]
    by_class: dict[str, ClassPrediction] = field(default_factory=dict)

    def latency(self, metric: str, of: str = "") -> Latency:
        """
        Return a latency of a class of requests, or of all.

        Gaps between tokens (`itl`) are those of all: a step gives every sequence in it a token.
        """
        found: Latency = getattr(self.by_class[of] if of and metric != "itl" else self, metric)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom(Spec):
    """Largest load factor at which the SLO still holds as surely, and what breaks first beyond."""

    load_factor: float
    binds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNote:
    """
    The fit that the step times stand on.

    Attributes:
        name: of the calibration, or of the GPU's tables.
        date: ISO 8601, of the measurements.
        error_fraction: the larger residual of its two pools; `None`: nothing was fitted.
    """

    name: str
    date: str
    error_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(Spec):
    """How many measured rows are like this plan, and how far off predictions of them were."""

    num_rows: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployable(Spec):
    """
    Whether `serving up` can realise the plan.

    Attributes:
        profile: name, version and connector of the engine profile, for people and messages.
        rule_broken: the rule of the profile that the plan breaks; `None`: it can be deployed.
    """

    profile: str
    rule_broken: str | None = None

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return self.rule_broken is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """
    What the pools take, spare replicas included.

    Attributes:
        gpu_power_w, price_usd_per_hour: of all GPUs; `None`: that of one is unknown.
        stranded_gpus: of the nodes taken, those that no replica uses.
    """

    gpus: int
    nodes: int
    gpu_power_w: float | None
    price_usd_per_hour: float | None
    stranded_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLoad(Spec):
    """
    What the planned load takes of the hosts in front of the engines.

    Attributes:
        processes: endpoint processes, which listen at one port; the gate is one more.
        cores: cores that they keep busy, all together, on average.
        gate_cores: the same of the gate, of which there is one.
        memory_bytes: memory of all of them.
    """

    processes: int
    cores: float
    gate_cores: float
    memory_bytes: float

    def _check(self) -> None:
        if self.processes < 1:
            raise InputError("processes", self.processes, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence(Spec):
    """
    How sure the promise is, and of what.

    Attributes:
        fraction: chance that the SLO holds, of arrivals and of the step-time model's own error; 0
            of a search that was stopped before it simulated.
        prefill_factor, decode_factor: on the steps in the simulations that the plan passed.
        ttft_factor: on the predicted TTFT, with which the SLO holds as well.
        tpot_factor: the same on TPOT and ITL.
        requests: simulated in them.
        seeds: of arrivals, each a run of its own.
        tightest: limits that were used up most, seconds simulated by name.
        other_pools: what the other kind of pools (aggregated or split) would take.
        interrupted: the search was stopped: the best plan so far.
    """

    fraction: float
    prefill_factor: float
    decode_factor: float
    ttft_factor: float
    tpot_factor: float
    requests: int
    seeds: int
    tightest: dict[str, float]
    other_pools: str = ""
    interrupted: bool = False

    @property
    def unverified(self) -> bool:
        """Return whether the sizes are an estimate, because an interrupt ended the search early."""
        return self.interrupted and not self.seeds
