"""Step times of every layout: the calibration's, or fitted once per degree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sizing.arrivals import length_quantiles
from sizing.errors import InputError
from sizing.latency.fit import decode_coefficients, path_coefficients, prefill_coefficients
from sizing.latency.step import Machine
from sizing.plan import StepModel
from sizing.specs.slicing import Slicing
from sizing.specs.step import Interference
from sizing.traffic.stage import QUANTILES

if TYPE_CHECKING:
    from sizing.plan import Inputs
    from sizing.search.layout import Layout
    from sizing.specs.calibration import CalibrationKey
    from sizing.specs.step import StepCoefficients


class StepModels:
    """Step models of one scenario; each degree is fitted when it is first asked for."""

    def __init__(self, inputs: Inputs) -> None:
        """
        Check that step times can be had at all.

        Raises:
            InputError: a CPU without a calibration, or a calibration of something else.
        """
        if inputs.calibration is not None:
            _check(inputs.calibration.key, inputs)
        elif inputs.gpu.kind == "cpu":
            raise InputError(
                f"gpu {inputs.gpu.name}: step times",
                None,
                "a calibration: a CPU has no datasheet to compute them from",
                "run `sizing calibrate SCENARIO --engine -o calibration.json` (it calls"
                " `serving measure`), then pass --calibration calibration.json",
            )
        self._inputs = inputs
        self._prefill: dict[int, StepCoefficients] = {}
        self._decode: dict[int, StepCoefficients] = {}

    def of(self, layout: Layout) -> StepModel:
        """Return the step model of *layout*."""
        found = self._inputs.calibration
        if found is not None:
            return StepModel(
                prefill=found.prefill,
                decode=found.decode,
                path=found.path,
                interference=found.interference,
            )
        prompts = length_quantiles(self._inputs.scenario.workload.input_tokens, QUANTILES)
        return StepModel(
            prefill=self._fitted_prefill(layout.prefill_tp),
            decode=self._fitted_decode(layout.decode_tp),
            path=path_coefficients(
                machine(self._inputs),
                prefill_tp=layout.prefill_tp,
                decode_tp=layout.decode_tp,
                tokens=float(prompts.mean()),
            ),
            interference=Interference(),
        )

    def _fitted_prefill(self, tp: int) -> StepCoefficients:
        """Fit over the prompts of the load, in chunks of at most the token budget."""
        if tp not in self._prefill:
            load = self._inputs.scenario.workload
            computed = length_quantiles(load.input_tokens, QUANTILES) - load.prefix_tokens
            self._prefill[tp] = prefill_coefficients(
                machine(self._inputs),
                slicing=Slicing(tp=tp),
                shortest=max(1, int(computed.min())),
                longest=max(1, int(computed.max())),
                cached=load.prefix_tokens,
            )
        return self._prefill[tp]

    def _fitted_decode(self, tp: int) -> StepCoefficients:
        """Fit over every batch the engine may hold, at the contexts of the load."""
        if tp not in self._decode:
            load = self._inputs.scenario.workload
            prompts = length_quantiles(load.input_tokens, QUANTILES)
            answers = length_quantiles(load.output_tokens, QUANTILES)
            middle = float(prompts.mean() + np.mean(answers**2) / (2 * answers.mean()))
            self._decode[tp] = decode_coefficients(
                machine(self._inputs),
                slicing=Slicing(tp=tp),
                max_batch=self._inputs.engine.max_batch_size,
                contexts=(middle / 2, middle * 1.5),
            )
        return self._decode[tp]


def machine(inputs: Inputs) -> Machine:
    """Return what the term-by-term model runs on."""
    return Machine(model=inputs.model, gpu=inputs.gpu, cluster=inputs.cluster, engine=inputs.engine)


def _check(key: CalibrationKey, inputs: Inputs) -> None:
    """Refuse a calibration of another model, engine or dtype."""
    expected = {
        "model_config_hash": inputs.model.config_hash,
        "engine": inputs.engine.name,
        "engine_version": inputs.engine.version,
        "dtype": inputs.model.weight_dtype,
    }
    for name, value in expected.items():
        if getattr(key, name) != value:
            raise InputError(
                f"calibration: key.{name}",
                getattr(key, name),
                f"{value}, as the scenario has it",
                "calibrate again: `sizing calibrate SCENARIO --engine -o FILE`",
            )
