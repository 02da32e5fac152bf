"""Steps of every configuration of a scenario: the calibration's, or a table per replica shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.plan import StepModel
from minicluster.specs.step import Interference
from minicluster.workload.arrivals import equally_likely
from sizing.latency.collectives import path_coefficients
from sizing.latency.step import step_table
from sizing.latency.term import Machine
from sizing.planner import bounds
from sizing.planner.bounds import QUANTILES, OfferedLoad, StepLimits
from sizing.planner.configuration import with_load
from sizing.planner.error_model import AS_PREDICTED
from sizing.planner.layout import max_decode_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from minicluster.plan import Inputs
    from minicluster.specs.calibration import CalibrationKey
    from minicluster.specs.step import PathCoefficients, StepTable
    from sizing.planner.configuration import Configuration
    from sizing.planner.error_model import StepErrors
    from sizing.planner.layout import Layout, LayoutShape

    Steps = dict[tuple[Layout, int, StepErrors], StepModel]
    """By layout, local threshold, and the factors that steps are slower by."""


class StepModels:
    """Steps under the load of one scenario; a replica shape is tabulated when it is first used."""

    def __init__(
        self,
        inputs: Inputs,
        known: Steps | None = None,
        *,
        batches: int | None = None,
        sequences: int | None = None,
    ) -> None:
        """
        Check that step times are known.

        Args:
            known: step models as far as they are known, to which those that are made are added.
            batches: under way in a pipeline at a time; `None`: one in each stage.
            sequences: most in a step of a pool that decodes; `None`: as memory allows.

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
        self.inputs = inputs
        self._models: Steps = {} if known is None else known
        self._under_way, self._most_sequences = batches, sequences
        self._batches: dict[tuple[LayoutShape, float, float], int] = {}
        self._tables: dict[tuple[LayoutShape, int, float], StepTable] = {}
        self._machines = {gpu: Machine.of(inputs, gpu) for gpu in inputs.kinds}
        self._loads: dict[object, OfferedLoad] = {}
        self._busy: dict[object, float] = {}

    def at_rate(self, requests_per_s: float) -> StepModels:
        """Return the same steps under another rate of the same requests."""
        load = self.inputs.scenario.workload.at_rate(requests_per_s)
        return StepModels(with_load(self.inputs, load), self._models)

    def load(self, chosen: Configuration, errors: StepErrors = AS_PREDICTED) -> OfferedLoad:
        """Return the scenario's load on one batch of each pool, with steps so much slower."""
        threshold = chosen.local_threshold_tokens
        key = chosen.layout, threshold, *chosen.max_batch.values(), errors
        if key not in self._loads:
            shapes = chosen.layout.shapes
            stages = {
                role: StepLimits(
                    max_batch_size=chosen.max_batch[role],
                    max_batched_tokens=self.inputs.engine_on(shape.gpu).max_num_batched_tokens,
                )
                for role, shape in shapes.items()
            }
            last = stages[chosen.last]
            self._loads[key] = OfferedLoad(
                workload=self.inputs.scenario.workload,
                step_model=self.of(chosen.layout, threshold, errors),
                prefill=stages.get("prefill") or replace(last, max_batch_size=1),
                decode=last,
                split="prefill" in stages,
                local_threshold_tokens=threshold,
                tokens_per_step=self.inputs.engine.tokens_per_step,
            )
        return self._loads[key]

    def known(self, chosen: Configuration) -> Steps:
        """Return the steps of a configuration's layout as predicted, for another process."""
        key = chosen.layout, chosen.local_threshold_tokens, AS_PREDICTED
        return {key: self.of(*key)}

    def busy(self, chosen: Configuration, role: str, errors: StepErrors) -> float:
        """Return the batches of a pool that the load keeps busy all the time (eq. T2, T3, L6)."""
        # Layouts that share the pool share the number.
        shape, threshold = chosen.layout.shapes[role], chosen.local_threshold_tokens
        key = role, shape, chosen.max_batch[role], threshold, errors
        if key not in self._busy:
            keeps = bounds.busy_prefill if role == "prefill" else bounds.busy_decode
            self._busy[key] = keeps(self.load(chosen, errors))
        return self._busy[key]

    def of(
        self,
        layout: Layout,
        local_threshold_tokens: int = 0,
        errors: StepErrors = AS_PREDICTED,
    ) -> StepModel:
        """Return the step model of a layout, of one batch of each replica."""
        key = layout, local_threshold_tokens, errors
        if key not in self._models:
            measured = self.inputs.calibration
            if errors != AS_PREDICTED:
                found = self.of(layout, local_threshold_tokens).slowed(
                    prefill=errors.prefill, decode=errors.decode, mixed=layout.prefill is None
                )
            elif measured is not None:
                found = StepModel.calibrated(measured)
            else:
                found = self._tabulated(layout, local_threshold_tokens or np.inf)
            self._models[key] = found
        return self._models[key]

    def _tabulated(self, layout: Layout, longest: float) -> StepModel:
        """Tabulate the steps of a layout whose decode pool computes prompts up to *longest*."""
        first, last = layout.prefill or layout.decode, layout.decode
        prompts, answers = self._lengths()
        context = float(prompts.mean() + np.mean(answers**2) / (2 * answers.mean()))
        fit = self._most_sequences or self.max_decode_batch(last, context=context, deviation=0.0)
        most = max(1, fit)
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
        load = self.inputs.scenario.workload
        prompts, _, class_of = equally_likely(load, QUANTILES)
        cached = np.array([part.prefix_tokens for part in load.parts])[class_of]
        counts = prompts <= max(longest, prompts[0])
        return float(np.maximum(1.0, prompts - cached)[counts].mean())

    def max_decode_batch(self, shape: LayoutShape, *, context: float, deviation: float) -> int:
        """Cached `layout.max_decode_batch`."""
        key = shape, context, deviation
        if key not in self._batches:
            self._batches[key] = max_decode_batch(
                self.inputs, shape, context=context, deviation=deviation
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
                most=(self._largest_step(shape.gpu), max_sequences),
                contexts=(prompts, prompts + answers),
                prompt_tokens=prompt_tokens,
                batches=self._under_way or shape.slicing.pp,
            )
        return self._tables[key]

    def _largest_step(self, gpu: str) -> int:
        """Return the most prompt tokens of a step; a prompt that is not chunked has one alone."""
        engine = self._machines[gpu].engine
        if engine.scheduling.chunked_prefill:
            return engine.max_num_batched_tokens
        longest = max(part.longest_prompt_tokens for part in self.inputs.scenario.workload.parts)
        return max(engine.max_num_batched_tokens, longest)

    def _lengths(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        prompts, answers, _ = equally_likely(self.inputs.scenario.workload, QUANTILES)
        return prompts, answers


def utilisations(
    models: StepModels, chosen: Configuration, errors: StepErrors = AS_PREDICTED
) -> dict[str, float]:
    """
    Return the share of each pool's capacity that the load takes, without queues and interference.

    No scheduling serves a prompt in less than its share of a full batch, nor a token in less than
    its share of a full decode step (docs/model.md, eq. T2 and T3).
    """
    return {
        role: models.busy(chosen, role, errors) / chosen.lanes(role) for role in chosen.replicas
    }


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
