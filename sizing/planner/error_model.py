"""The error model: how far predictions were off, and latencies against the limits of the SLO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.plan import Validation
from minicluster.units import seconds
from sizing.planner.intervals import DISTANCES, UNLOADED, labels_of, read_residuals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from minicluster.plan import Inputs
    from minicluster.specs.slo import SloSpec
    from sizing.planner.intervals import Labels, PredictionInterval, Support

    Promises = Mapping[str, SloSpec]
    """Limits of each class of requests by its name; by an empty one where there are none."""

LOAD = "open"
"""Kind of measured rows that plans are compared with: open-loop load, Poisson arrivals."""

NO_DRAFTS = "none of them with speculative decoding; the accepted tokens are the scenario's"
SPLIT_MODE = "split mode: validated on CPU only"
"""Note on every split plan, until split deployments are measured on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """
    Factors by which predictions may be off, at some confidence.

    Attributes:
        ttft: factor on TTFT as predicted, under load.
        tpot: the same on TPOT and ITL.
    """

    prefill: float = 1.0
    decode: float = 1.0
    ttft: float = 1.0
    tpot: float = 1.0


AS_PREDICTED = StepErrors()
"""Steps and latencies as the model says."""


def step_errors(inputs: Inputs, confidence: float) -> StepErrors:
    """
    Return the factors on steps and latencies that are exceeded with a chance of 1 - *confidence*.

        steps: the quantile c of measured / predicted of rows without queues; latencies: that of
        rows under load (docs/model.md, eq. L3)

    Args:
        inputs: engine and its version, model and GPU: of each, what was measured counts.
        confidence: c, from one half on.

    Returns:
        Factors of at least 1; 1 for a calibrated machine, whose own load tests are the evidence,
        and where no row was measured.

    Source:
        Residuals of `sizing validate` in configs/validation/evidence.json. Step times of one
        deployment err alike, so that one factor holds for a whole run.

    Ignores:
        That prefill and decode may err apart: both are taken at the same quantile. That
        percentiles may err more than the means and medians of which there are rows.
    """
    if inputs.calibration is not None:
        return StepErrors()
    unloaded, loaded = (_labels(kind, inputs) for kind in (UNLOADED, LOAD))
    known = read_residuals().intervals
    steps, latencies = [], []
    for quantity in ("ttft", "tpot"):
        steps.append(known.bound(quantity, unloaded, confidence) or 1.0)
        latencies.append(known.bound(quantity, loaded, confidence) or 1.0)
    return StepErrors(prefill=steps[0], decode=steps[1], ttft=latencies[0], tpot=latencies[1])


def interval_around(quantity: str, inputs: Inputs) -> PredictionInterval | None:
    """
    Return the interval around a prediction of one second, from the residuals of similar rows.

    It is the wider, the less of the plan was measured.

    `None` for a calibrated machine, whose own load tests are the evidence, and where no row was
    measured.
    """
    if inputs.calibration is not None:
        return None
    return read_residuals().intervals.around(1.0, quantity, _labels(LOAD, inputs))


def _labels(kind: str, inputs: Inputs) -> Labels:
    """Labels of the plan's predictions under one kind of load."""
    engine, model = inputs.engine, inputs.model
    return labels_of(kind, engine.name, engine.version, model, name=model.id, gpu=inputs.gpu.name)


def validation(inputs: Inputs, *, split: bool) -> Validation:
    """Return the number of measurements of deployments like this one, and how far off they were."""
    found = _measured(inputs, split=split)
    notes = [found.note]
    if split and inputs.engine.deployable:
        notes.append(SPLIT_MODE)
    if inputs.engine.speculative_tokens:
        notes.append(NO_DRAFTS)
    return replace(found, note="; ".join(notes))


def _measured(inputs: Inputs, *, split: bool) -> Validation:
    if inputs.calibration is not None:
        key = inputs.calibration.key
        return Validation(
            num_rows=inputs.calibration.num_rows,
            note=f"step times measured on {key.processor}, {key.engine} {key.engine_version}",
        )
    found = _similar(inputs, split=split)
    around = interval_around("tpot", inputs)
    if around is None:
        return found
    nearest = DISTANCES[around.distance]
    note = f"{found.note}; intervals from {around.rows} rows; nearest measurement: {nearest}"
    if around.unmeasured:
        note += f"; no such rows of {' or '.join(around.unmeasured)}"
    return Validation(num_rows=found.num_rows, note=note)


def _similar(inputs: Inputs, *, split: bool) -> Validation:
    """Count rows of the same engine, GPU and precision, and of the same kind of pools."""
    engine, gpu, dtype = inputs.engine.name, inputs.gpu.name, inputs.model.weight_dtype
    kinds = {True: "split", False: "aggregated"}
    kind = f"{kinds[split]} {engine} on {gpu} ({dtype})"
    similar = [s for s in read_residuals().support if s.gpu == gpu]
    own = [s for s in similar if s.engine == engine and s.weight_dtype == dtype]
    same = [s for s in own if s.split is split]
    if same:
        return Validation(num_rows=same[0].rows, note=f"{kind}: {_errors(same[0])}")
    note = f"no measurement of {kind}; nearest: "
    if own:
        note += f"{own[0].rows} rows of {kinds[not split]} pools, {_errors(own[0])}"
    elif similar:
        rows = sum(s.rows for s in similar)
        note += f"{rows} rows of other engines or precisions on {gpu}"
    else:
        note += f"none on {gpu}"
    return Validation(num_rows=0, note=note)


def _errors(support: Support) -> str:
    parts = [
        f"{name} {value:.0%}"
        for name, value in (("TTFT", support.ttft_median), ("TPOT", support.tpot_median))
        if value is not None
    ]
    return "median error " + ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """
    One limit of the SLO: the latency it limits, its value and the limit.

    Attributes:
        metric: `ttft`, `tpot`, `itl` or `e2e`.
        of: class of requests; empty where there are none.
    """

    metric: str
    percentile: str
    seconds: float
    limit_s: float
    of: str = ""

    @property
    def name(self) -> str:
        """Class, latency and percentile, such as `chat TTFT p99`."""
        return f"{self.of} {self.metric.upper()} {self.percentile}".strip()

    @property
    def ratio(self) -> float:
        """Value over limit: above 1 the limit is missed."""
        return self.seconds / self.limit_s

    def with_errors(self, errors: StepErrors) -> Check:
        """
        Return the check of a latency that is as far off as those measured under load.

        E2E, which is made of both, errs as much as the worse of TTFT and TPOT.
        """
        both = max(errors.ttft, errors.tpot)
        factor = {"ttft": errors.ttft, "e2e": both}.get(self.metric, errors.tpot)
        return replace(self, seconds=self.seconds * factor)


def missed_limits(checks: Iterable[Check]) -> tuple[str, ...]:
    """Return the limits that latencies exceed, one phrase each."""
    return tuple(
        f"{check.name} {seconds(check.seconds)}, limit {seconds(check.limit_s)}"
        for check in checks
        if check.seconds > check.limit_s
    )
