"""Constants fitted on one engine, one model shape and one machine, with their error."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.specs.checks import STRICT
from minicluster.specs.step import Interference, PathCoefficients, StepCoefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKey:
    """What a calibration holds for; anything else needs another one."""

    __pydantic_config__ = STRICT

    processor: str
    cores: int
    engine: str
    engine_version: str
    model_config_hash: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSpec:
    """
    A fit.

    Attributes:
        date: ISO 8601, when the measurements were taken.
        num_rows: measured rows behind the fit.
    """

    __pydantic_config__ = STRICT

    name: str
    date: str
    key: CalibrationKey
    num_rows: int
    prefill: StepCoefficients
    decode: StepCoefficients
    path: PathCoefficients
    interference: Interference
