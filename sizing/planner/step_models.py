"""Step models of every layout: the calibration's, or a table once per replica shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.plan import StepModel
from minicluster.specs.step import Interference
from minicluster.workload.arrivals import equally_likely
from sizing.latency.collectives import path_coefficients
from sizing.latency.step import Machine
from sizing.latency.step_table import step_table
from sizing.planner.layout import max_decode_batch
from sizing.planner.tandem import QUANTILES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from minicluster.specs.calibration import CalibrationKey
    from minicluster.specs.step import PathCoefficients, StepTable
    from sizing.planner.layout import Layout, LayoutShape


class StepModels:
    """The step models of one scenario; a replica shape is tabulated when it is first used."""

    def __init__(self, inputs: Inputs) -> None:
        """
        Check that step times are known.

        Raises:
            InputError: a CPU without a calibration, or a calibration of something else.
        """
        if inputs.calibration is not None:
            _check(inputs.calibration.key, inputs)
            _check_engine(inputs)
        elif inputs.gpu.kind == "cpu":
            raise InputError(
                f"gpu {inputs.gpu.name}: step times",
                None,
                "a calibration: a CPU has no datasheet to compute them from",
                "run `sizing calibrate SCENARIO --engine -o calibration.json` (it calls"
                " `serving measure`), then pass --calibration calibration.json",
            )
        self._inputs = inputs
        self._batches: dict[tuple[LayoutShape, float, float], int] = {}
        self._tables: dict[tuple[LayoutShape, int, float], StepTable] = {}
        self._machines = {gpu: Machine.of(inputs, gpu) for gpu in inputs.kinds}

    def of(self, layout: Layout) -> StepModel:
        """Return the step model of *layout*, of one batch of each replica."""
        found = self._inputs.calibration
        if found is not None:
            return StepModel.calibrated(found)
        first, last = layout.prefill or layout.decode, layout.decode
        local = self._inputs.scenario.search.local_threshold_tokens
        longest = np.inf if layout.prefill is None else local or np.inf
        prompts, answers = self._lengths()
        context = float(prompts.mean() + np.mean(answers**2) / (2 * answers.mean()))
        most = max(1, self.max_decode_batch(last, context=context, deviation=0.0))
        return StepModel(
            prefill=self._table(first, 1, self._mean_computed()),
            decode=self._table(last, most, self._mean_computed(longest)),
            path=self._path(layout),
            interference=Interference(),
        )

    def _path(self, layout: Layout) -> PathCoefficients:
        """Return the constants of a request; between two kinds of GPU the slower NIC counts."""
        prompts, _ = self._lengths()
        last = layout.decode
        first = layout.prefill or last
        paths = [
            path_coefficients(
                self._machines[gpu],
                prefill_tp=first.slicing.tp,
                decode_tp=last.slicing.tp,
                tokens=float(prompts.mean()),
            )
            for gpu in sorted({first.gpu, last.gpu})
        ]
        return max(paths, key=lambda path: path.transfer_per_token_s)

    def _mean_computed(self, longest: float = np.inf) -> float:
        """Mean tokens, not in the prefix cache, of prompts up to *longest*, or of the shortest."""
        load = self._inputs.scenario.workload
        prompts, _, class_of = equally_likely(load, QUANTILES)
        cached = np.array([part.prefix_tokens for part in load.parts])[class_of]
        counts = prompts <= max(longest, prompts[0])
        return float(np.maximum(1.0, prompts - cached)[counts].mean())

    def max_decode_batch(self, shape: LayoutShape, *, context: float, deviation: float) -> int:
        """Return what the function of this name says, which many layouts ask of one shape."""
        key = shape, context, deviation
        if key not in self._batches:
            self._batches[key] = max_decode_batch(
                self._inputs, shape, context=context, deviation=deviation
            )
        return self._batches[key]

    def _table(self, shape: LayoutShape, max_sequences: int, prompt_tokens: float) -> StepTable:
        """Tabulate the steps of one batch of a replica; every batch of a pipeline is under way."""
        key = shape, max_sequences, prompt_tokens
        if key not in self._tables:
            prompts, answers = (float(each.mean()) for each in self._lengths())
            self._tables[key] = step_table(
                self._machines[shape.gpu],
                shape.slicing,
                most=(self._machines[shape.gpu].engine.max_num_batched_tokens, max_sequences),
                contexts=(prompts, prompts + answers),
                prompt_tokens=prompt_tokens,
                batches=shape.slicing.pp,
            )
        return self._tables[key]

    def _lengths(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        prompts, answers, _ = equally_likely(self._inputs.scenario.workload, QUANTILES)
        return prompts, answers


def _check_engine(inputs: Inputs) -> None:
    """Refuse what the steps of a calibration were not timed with."""
    drafts, lora = inputs.engine.speculative_tokens, inputs.engine.lora
    if lora is not None:
        raise InputError(
            "engine.max_loras",
            lora.max_loras,
            "none with a calibration: its steps were timed without adapters",
            "leave out max_loras and workload.lora_adapters",
        )
    if drafts:
        raise InputError(
            "engine.speculative_tokens",
            drafts,
            "0 with a calibration: its steps were timed without drafts",
            "leave out speculative_tokens and mean_accepted_tokens",
        )


def _check(key: CalibrationKey, inputs: Inputs) -> None:
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
