"""Step models of every layout: the calibration's, or fitted once per replica shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from minicluster.plan import StepModel
from minicluster.specs.step import Interference
from minicluster.workload.arrivals import length_quantiles
from sizing.latency.fit import decode_coefficients, path_coefficients, prefill_coefficients
from sizing.latency.load import decode_load, prefill_load
from sizing.latency.step import Machine, stage_s, step_s
from sizing.planner.layout import max_decode_batch
from sizing.planner.tandem import QUANTILES

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from minicluster.specs.calibration import CalibrationKey
    from minicluster.specs.slicing import Slicing
    from minicluster.specs.step import PathCoefficients, StepCoefficients
    from sizing.latency.load import StepLoad
    from sizing.planner.layout import Layout, LayoutShape


class StepModels:
    """The step models of one scenario; a replica shape is fitted when it is first used."""

    def __init__(self, inputs: Inputs) -> None:
        """
        Check that step times are known.

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
        self._prefill: dict[LayoutShape, StepCoefficients] = {}
        self._decode: dict[LayoutShape, StepCoefficients] = {}

    def of(self, layout: Layout) -> StepModel:
        """Return the step model of *layout*, of one batch of each replica."""
        found = self._inputs.calibration
        if found is not None:
            return StepModel(
                prefill=found.prefill,
                decode=found.decode,
                path=found.path,
                interference=found.interference,
            )
        first, last = layout.prefill or layout.decode, layout.decode
        prefill, decode = self._fitted_prefill(first), self._fitted_decode(last)
        local = self._inputs.scenario.search.local_threshold_tokens
        if layout.prefill is None or local:
            longest = local if local and layout.prefill is not None else np.inf
            decode = aggregated_steps(
                self._fitted_prefill(last), decode, self._mean_computed(longest)
            )
        return StepModel(
            prefill=prefill, decode=decode, path=self._path(layout), interference=Interference()
        )

    def _path(self, layout: Layout) -> PathCoefficients:
        """Return the constants of a request; between two kinds of GPU the slower NIC counts."""
        prompts = length_quantiles(self._inputs.scenario.workload.input_tokens, QUANTILES)
        last = layout.decode
        first = layout.prefill or last
        paths = [
            path_coefficients(
                machine(self._inputs, gpu),
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
        prompts = length_quantiles(load.input_tokens, QUANTILES)
        prompts = prompts[prompts <= max(longest, prompts[0])]
        return float(np.maximum(1.0, prompts - load.prefix_tokens).mean())

    def _fitted_prefill(self, shape: LayoutShape) -> StepCoefficients:
        """Fit over the prompts of the load, in chunks of at most the token budget."""
        if shape not in self._prefill:
            load = self._inputs.scenario.workload
            computed = length_quantiles(load.input_tokens, QUANTILES) - load.prefix_tokens
            on = machine(self._inputs, shape.gpu)
            fitted = prefill_coefficients(
                on,
                slicing=shape.slicing,
                shortest=max(1, int(computed.min())),
                longest=max(1, int(computed.max())),
                cached=load.prefix_tokens,
            )
            typical = prefill_load(self._mean_computed(), load.prefix_tokens)
            self._prefill[shape] = fitted.scaled(full_pipeline(on, typical, shape.slicing))
        return self._prefill[shape]

    def _fitted_decode(self, shape: LayoutShape) -> StepCoefficients:
        """Fit over every batch that engine and memory allow, at the contexts of the load."""
        if shape not in self._decode:
            load = self._inputs.scenario.workload
            prompts = length_quantiles(load.input_tokens, QUANTILES)
            answers = length_quantiles(load.output_tokens, QUANTILES)
            middle = float(prompts.mean() + np.mean(answers**2) / (2 * answers.mean()))
            on = machine(self._inputs, shape.gpu)
            batch = max(1, max_decode_batch(self._inputs, shape, context=middle, deviation=0.0))
            fitted = decode_coefficients(
                on,
                slicing=shape.slicing,
                max_batch=batch,
                contexts=(middle / 2, middle * 1.5),
            )
            typical = decode_load(batch / 4, middle)
            self._decode[shape] = fitted.scaled(full_pipeline(on, typical, shape.slicing))
        return self._decode[shape]


def full_pipeline(on: Machine, load: StepLoad, slicing: Slicing) -> float:
    """
    Return the time between two steps of one batch, over the time of one pass of the pipeline.

        max(1, pp t_stage / t)      (docs/model.md, eq. L5)

    pp batches are under way: each has its step when the slowest stage has served all of them.
    """
    if slicing.pp == 1:
        return 1.0
    through = float(step_s(on, load, slicing=slicing))
    return max(1.0, slicing.pp * float(stage_s(on, load, slicing=slicing)) / through)


def aggregated_steps(
    prefill: StepCoefficients, decode: StepCoefficients, tokens: float
) -> StepCoefficients:
    """
    Return the step model of an aggregated pool.

        b, d and what is read from decode, a, c from prefill; the fixed extra cost of a prompt's
        step is spread over its tokens: a + max(0, base_p - base_d) / E[n]
        (docs/model.md, eq. L6)

    Args:
        prefill: step model of a prefill pool of the same replicas.
        decode: step model of a decode pool of the same replicas.
        tokens: E[n], mean tokens of a prompt that are computed.
    """
    extra = max(0.0, prefill.base_s - decode.base_s) / tokens
    return replace(
        decode,
        per_prefill_token_s=prefill.per_prefill_token_s + extra,
        per_pair_s=prefill.per_pair_s,
        max_tokens=prefill.max_tokens,
        error_fraction=max(prefill.error_fraction, decode.error_fraction),
    )


def machine(inputs: Inputs, gpu: str | None = None) -> Machine:
    """Return the machine of the term-by-term model; without *gpu* with the cluster's own GPU."""
    kind = inputs.gpu if gpu is None else inputs.kinds[gpu]
    engine = inputs.engine.on(kind)
    return Machine(model=inputs.model, gpu=kind, cluster=inputs.cluster, engine=engine)


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
