"""How much measurement stands behind a prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sizing.plan import Validation
from sizing.validation.evidence import read_evidence
from sizing.validation.label import path_of

if TYPE_CHECKING:
    from sizing.plan import Inputs
    from sizing.validation.evidence import Support
    from sizing.validation.interval import Interval

LOAD = "open"
"""Plans are for Poisson arrivals."""


def interval_around(quantity: str, inputs: Inputs) -> Interval | None:
    """
    Interval around a prediction of one second, from the residuals of rows most like it.

    `None` for a measured machine, whose own load tests say more, and where no row was measured.
    """
    if inputs.calibration is not None:
        return None
    path = path_of(LOAD, inputs.engine.name, inputs.model)
    return read_evidence().intervals.around(1.0, quantity, path)


def validation(inputs: Inputs) -> Validation:
    """Count the measurements of deployments like this one, and say how far predictions were off."""
    if inputs.calibration is not None:
        key = inputs.calibration.key
        return Validation(
            num_rows=inputs.calibration.num_rows,
            note=f"step times measured on {key.processor}, {key.engine} {key.engine_version}",
        )
    found = _alike(inputs)
    around = interval_around("tpot", inputs)
    if around is None:
        return found
    group = around.group.partition("/")[2] or "any kind"
    note = f"{found.note}; intervals from {around.rows} rows ({group})"
    return Validation(num_rows=found.num_rows, note=note)


def _alike(inputs: Inputs) -> Validation:
    """Count rows of the same engine, GPU and precision, split as plans are."""
    engine, gpu, dtype = inputs.engine.name, inputs.gpu.name, inputs.model.weight_dtype
    kind = f"split {engine} on {gpu}, {dtype}"
    alike = [s for s in read_evidence().support if s.gpu == gpu]
    own = [s for s in alike if s.engine == engine and s.weight_dtype == dtype]
    split = [s for s in own if s.split]
    if split:
        return Validation(num_rows=split[0].rows, note=f"{kind}: {_errors(split[0])}")
    note = f"no measurement like this ({kind})"
    if own:
        note += f"; unsplit {own[0].rows} rows: {_errors(own[0])}"
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
