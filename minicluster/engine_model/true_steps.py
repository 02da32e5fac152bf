"""Step times of simulated engines that are not the plan's: engines as a calibration meets them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from minicluster.config import parse, read_json
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import Fault, InputError
from minicluster.plan import StepModel
from minicluster.specs.checks import Count, NotNegative, Spec
from minicluster.specs.step import Interference, StepTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from minicluster.specs.step import StepSpec

LEAST_FACTOR, MOST_FACTOR = 0.6, 1.8
"""How much faster and slower each part of a drawn step is than that of the plan."""

STEP_SHARE, PROMPT_SHARE, JOIN_SHARE = 0.3, 0.2, 0.2
"""Largest overheads of a drawn engine, as shares of the plan's step of one sequence."""

PADDED_TO = (1, 2, 4, *range(8, 1025, 8))
"""Batches for which vLLM has CUDA graphs; any other is padded to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueSteps(Spec):
    """
    Step times of simulated engines that are not the plan's: what a calibration has to find.

    Attributes:
        steps: step times and path; simulated pools share nothing, whatever it says of that.
        per_prompt_s: of each prompt of a step.
        per_join_s: by which each request that joins a batch delays those in it.
        padded_to: batches that decode steps are computed for, ascending; none: any.
    """

    steps: StepModel
    per_prompt_s: NotNegative = 0.0
    per_join_s: NotNegative = 0.0
    padded_to: tuple[Count, ...] = ()

    def _check(self) -> None:
        if any(size >= after for size, after in pairwise(self.padded_to)):
            raise InputError("padded_to", self.padded_to, "ascending numbers")

    def step(self, role: str) -> TrueStep:
        """Return the step of a pool."""
        return TrueStep(self, self.steps.of(role))

    def scaled(self, factor: float) -> TrueSteps:
        """Return engines that take *factor* times as long for everything."""
        steps = replace(
            self.steps.slowed(prefill=factor, decode=factor, mixed=False),
            path=self.steps.path.scaled(request=factor, transfer=factor),
        )
        return replace(
            self,
            steps=steps,
            per_prompt_s=factor * self.per_prompt_s,
            per_join_s=factor * self.per_join_s,
        )


class TrueStep:
    """A step with overheads that a plan's has no constants for."""

    def __init__(self, truth: TrueSteps, spec: StepSpec) -> None:
        """Keep them."""
        self._step = PlannedStep(spec)
        self._truth = truth
        self.join_delay_s = truth.per_join_s

    def decode_line(self, batch: int) -> tuple[float, float]:
        """See `StepTime`."""
        sizes = self._truth.padded_to
        at = bisect_left(sizes, batch)
        return self._step.decode_line(sizes[at] if at < len(sizes) else batch)

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context: int) -> float:
        """See `StepTime`."""
        chunks = tuple(chunks)
        step_s = self._step.step_s(chunks, batch, context)
        return step_s + self._truth.per_prompt_s * len(chunks)


def drawn(planned: StepModel, rng: Random) -> TrueSteps:
    """
    Draw an engine: each part of the plan's steps slower or faster, and overheads besides.

    Parts are those of a table (docs/model.md, eq. S9), apart for each pool: what a step takes
    whatever is in it, GEMMs of prompts and of further sequences, attention of prompts and of
    decode. The path has two more: request and KV pull.
    """

    def factor() -> float:
        return math.exp(rng.uniform(math.log(LEAST_FACTOR), math.log(MOST_FACTOR)))

    one_s = planned.decode.decode_line(1)[0]
    more_s = STEP_SHARE * rng.random() * one_s
    tables = [_other(of, [factor() for _ in range(5)], more_s) for of in _tables(planned)]
    return TrueSteps(
        steps=StepModel(
            prefill=tables[0],
            decode=tables[1],
            path=planned.path.scaled(request=factor(), transfer=factor()),
            interference=Interference(),
        ),
        per_prompt_s=PROMPT_SHARE * rng.random() * one_s,
        per_join_s=JOIN_SHARE * rng.random() * one_s,
        padded_to=PADDED_TO,
    )


def _tables(planned: StepModel) -> Iterator[StepTable]:
    for role in ("prefill", "decode"):
        step = planned.of(role)
        if not isinstance(step, StepTable):
            fault = Fault("has the coefficients of a calibration")
            raise InputError(f"step_model.{role}", fault, "the table of a plan without one")
        yield step


def _other(table: StepTable, factors: Sequence[float], more_s: float) -> StepTable:
    base, prompts, sequences, prompt_attention, decode_attention = factors
    idle_s = table.fixed_s[0][0]
    return replace(
        table,
        fixed_s=tuple(
            tuple(
                base * idle_s
                + sequences * (row[0] - idle_s)
                + prompts * max(0.0, fixed_s - row[0])
                + more_s
                for fixed_s in row
            )
            for row in table.fixed_s
        ),
        per_key_s=tuple(prompt_attention * key_s for key_s in table.per_key_s),
        per_context_token_s=tuple(
            decode_attention * token_s for token_s in table.per_context_token_s
        ),
    )


def read_true_steps(path: Path) -> TrueSteps:
    """Read a file of such an engine, checking every field."""
    return parse(TrueSteps, read_json(path, "step times of simulated engines"), place=str(path))
