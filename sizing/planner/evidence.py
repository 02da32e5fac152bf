"""How much measurement stands behind a prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from minicluster.plan import Validation
from sizing.evidence.evidence import read_evidence
from sizing.evidence.row import path_of

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.evidence.evidence import Support
    from sizing.evidence.interval import PredictionInterval

LOAD = "open"
"""Plans are for Poisson arrivals."""


SPLIT_MODE = "split mode: validated on CPU only"
"""Of every split plan, until rows of our own from GPUs say otherwise."""

UNLOADED = "static"
"""Of rows without queues: TTFT is the time of a prefill step there, TPOT that of a decode step."""

MEASURED_LEVEL = 0.9
"""Residual quantile that the evidence carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """
    What predictions may be off by, at some confidence.

    Attributes:
        prefill: factor on prefill steps.
        decode: factor on decode steps.
        ttft: factor on TTFT as predicted, under load.
        tpot: the same on TPOT and ITL.
    """

    prefill: float = 1.0
    decode: float = 1.0
    ttft: float = 1.0
    tpot: float = 1.0


def step_errors(inputs: Inputs, confidence: float) -> StepErrors:
    """
    How much longer than predicted steps and latencies take, with a chance of 1 - *confidence*.

        steps: ln f(c) = q_90 z(c) / z(0.9), q_90: 90 % quantile of ln(measured / predicted) of
        rows without queues; latencies: quantile c of rows under load, at least 1
        (docs/model.md, eq. L3)

    Args:
        inputs: model and engine, whose rows count where there are any; else all rows.
        confidence: c, from one half on.

    Returns:
        Factors of at least 1; 1 for a measured machine, whose own load tests say more, and where
        no row was ever measured.

    Source:
        Residuals of `sizing validate` in configs/validation/evidence.json. Step times of one
        deployment err alike, so that one factor holds for a whole run.

    Ignores:
        That prefill and decode may err apart: both are taken at the same quantile. That
        percentiles may err more than the means and medians of which there are rows.
    """
    if inputs.calibration is not None:
        return StepErrors()
    alone = path_of(UNLOADED, inputs.engine.name, inputs.model)
    loaded = path_of(LOAD, inputs.engine.name, inputs.model)
    known = read_evidence().intervals
    share = NormalDist().inv_cdf(confidence) / NormalDist().inv_cdf(MEASURED_LEVEL)
    steps, latencies = [], []
    for quantity in ("ttft", "tpot"):
        around = known.around(1.0, quantity, alone)
        step = 1.0 if around is None else math.exp(share * math.log(around.high_s))
        steps.append(step)
        latencies.append(max(1.0, known.bound(quantity, loaded, confidence) or 1.0))
    return StepErrors(prefill=steps[0], decode=steps[1], ttft=latencies[0], tpot=latencies[1])


def interval_around(quantity: str, inputs: Inputs) -> PredictionInterval | None:
    """
    Interval around a prediction of one second, from the residuals of rows most like it.

    `None` for a measured machine, whose own load tests say more, and where no row was measured.
    """
    if inputs.calibration is not None:
        return None
    path = path_of(LOAD, inputs.engine.name, inputs.model)
    return read_evidence().intervals.around(1.0, quantity, path)


def validation(inputs: Inputs, *, split: bool = True) -> Validation:
    """Count the measurements of deployments like this one, and say how far predictions were off."""
    found = _measured(inputs, split=split)
    return replace(found, note=f"{found.note}; {SPLIT_MODE}") if split else found


def _measured(inputs: Inputs, *, split: bool) -> Validation:
    """Count those of the machine itself, or of machines alike."""
    if inputs.calibration is not None:
        key = inputs.calibration.key
        return Validation(
            num_rows=inputs.calibration.num_rows,
            note=f"step times measured on {key.processor}, {key.engine} {key.engine_version}",
        )
    found = _alike(inputs, split=split)
    around = interval_around("tpot", inputs)
    if around is None:
        return found
    group = around.group.partition("/")[2] or "any kind"
    note = f"{found.note}; intervals from {around.rows} rows ({group})"
    return Validation(num_rows=found.num_rows, note=note)


def _alike(inputs: Inputs, *, split: bool) -> Validation:
    """Count rows of the same engine, GPU and precision, split or not as the plan is."""
    engine, gpu, dtype = inputs.engine.name, inputs.gpu.name, inputs.model.weight_dtype
    kinds = {True: "split", False: "unsplit"}
    kind = f"{kinds[split]} {engine} on {gpu}, {dtype}"
    alike = [s for s in read_evidence().support if s.gpu == gpu]
    own = [s for s in alike if s.engine == engine and s.weight_dtype == dtype]
    same = [s for s in own if s.split is split]
    if same:
        return Validation(num_rows=same[0].rows, note=f"{kind}: {_errors(same[0])}")
    note = f"no measurement like this ({kind})"
    if own:
        note += f"; {kinds[not split]} {own[0].rows} rows: {_errors(own[0])}"
    elif alike:
        rows = sum(s.rows for s in alike)
        note += f"; {rows} rows of other engines or precisions on {gpu}"
    else:
        note += f"; nothing was ever validated on {gpu}"
    return Validation(num_rows=0, note=note)


def _errors(support: Support) -> str:
    """Write the median errors that were measured."""
    parts = [
        f"{name} {value:.0%}"
        for name, value in (("TTFT", support.ttft_median), ("TPOT", support.tpot_median))
        if value is not None
    ]
    return "median error " + ", ".join(parts)
