"""Engine steps as they were beside what the model gives the same steps: the pace of a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minicluster.plan import StepModel
from minicluster.specs.step import Interference
from minicluster.workload.engine_steps import EngineStep
from sizing.latency.calibration import nonnegative_least_squares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minicluster.specs.calibration import CalibrationSpec
    from minicluster.workload.engine_steps import EngineSteps

FEWEST = 20
"""Steps below which a mean of them says nothing."""

OUTLIERS = 0.02
"""Share of the steps of a load that a fit leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """
    How long the steps of one pool took in a load, against the model of the plan.

    Attributes:
        factor: measured / modelled seconds, both summed over the steps.
        measured_s, modelled_s: means of a step.
    """

    steps: int
    factor: float
    measured_s: float
    modelled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """
    Steps of one engine as columns, each of shape (steps,), in the order of time.

    Attributes:
        end_s: Unix time.
        seconds: that it took.
        beside: what the other pool did as the step began: sequences in its batch beside a prefill
            step, 1 beside any other step if prefill computed, 0 if it did not.
    """

    end_s: NDArray[np.float64]
    seconds: NDArray[np.float64]
    prompts: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    pairs: NDArray[np.float64]
    sequences: NDArray[np.float64]
    context_tokens: NDArray[np.float64]
    joined: NDArray[np.float64]
    beside: NDArray[np.float64]

    @property
    def begin_s(self) -> NDArray[np.float64]:
        """When each step began, Unix time, shape (steps,)."""
        return self.end_s - self.seconds

    @property
    def undisturbed(self) -> NDArray[np.bool_] | None:
        """Which `FEWEST` steps or more had the least beside them; `None`: too few of either."""
        if len(self.beside) < FEWEST:
            return None
        least = self.beside <= np.sort(self.beside)[FEWEST - 1]
        return least if (~least).sum() >= FEWEST else None

    def among(self, chosen: NDArray[np.bool_]) -> TimedSteps:
        """Return the *chosen* steps, shape (steps,)."""
        names = self.__dataclass_fields__
        return TimedSteps(**{name: getattr(self, name)[chosen] for name in names})


def timed_steps(steps: EngineSteps) -> dict[str, TimedSteps]:
    """Return the steps of each role as columns, with what the other role did meanwhile."""
    tables = {role: np.array(rows, dtype=np.float64) for role, rows in steps.of.items() if rows}
    timed = {}
    for role, table in tables.items():
        end_s, seconds, *contents = table.T
        other = tables.get("decode" if role == "prefill" else "prefill")
        sequences_column = EngineStep._fields.index("sequences") if role == "prefill" else None
        timed[role] = TimedSteps(
            end_s=end_s,
            seconds=seconds,
            prompts=contents[0],
            prompt_tokens=contents[1],
            pairs=contents[2],
            sequences=contents[3],
            context_tokens=contents[4],
            joined=contents[5],
            beside=_beside(end_s - seconds, other, sequences_column),
        )
    return timed


def _beside(
    at_s: NDArray[np.float64], other: NDArray[np.float64] | None, column: int | None
) -> NDArray[np.float64]:
    """Return a column of the other engine's step in progress at each time, or 1; 0 if idle."""
    if other is None:
        return np.zeros_like(at_s)
    end_s = other[:, 0]
    at = np.minimum(np.searchsorted(end_s, at_s, side="right"), len(end_s) - 1)
    busy = (end_s[at] - other[at, 1] <= at_s) & (at_s < end_s[at])
    return np.where(busy, 1.0 if column is None else other[at, column], 0.0)


def modelled_s(model: StepModel, role: str, steps: TimedSteps) -> NDArray[np.float64]:
    """
    Return the seconds that *model* gives each step, shape (steps,) (docs/model.md, eq. S1, Q9).

    Args:
        model: with the interference of pools on shared cores.
        role: of the pool whose steps these are.
        steps: as they were; *model* gets what was in them and beside them, not how long they took.

    Ignores:
        That the delay of a request that joins (h_d) is spread over two steps.
    """
    step, between = model.of(role), model.interference
    alone_s = np.array(
        [
            step.step_s(*load)
            for load in zip(
                steps.prompt_tokens.tolist(),
                steps.pairs.tolist(),
                steps.sequences.tolist(),
                steps.context_tokens.tolist(),
                strict=True,
            )
        ]
    )
    if role == "prefill":
        slower = between.prefill_fraction + steps.beside * between.prefill_per_sequence_fraction
        return alone_s * (1 + slower) + between.prefill_per_request_s * steps.prompts
    slower = between.decode_fraction * steps.beside
    return alone_s * (1 + slower) + between.decode_per_request_s * steps.joined


def paces(model: StepModel, steps: Mapping[str, TimedSteps]) -> dict[str, Pace]:
    """Return the pace of each pool of which enough steps are known (docs/model.md, eq. C6)."""
    return {
        role: Pace(
            steps=len(timed.seconds),
            factor=float(timed.seconds.sum() / modelled.sum()),
            measured_s=float(timed.seconds.mean()),
            modelled_s=float(modelled.mean()),
        )
        for role, timed in steps.items()
        if len(timed.seconds) >= FEWEST and (modelled := modelled_s(model, role, timed)).all()
    }


def fit_interference_to_steps(
    before: CalibrationSpec, steps: Mapping[str, TimedSteps]
) -> CalibrationSpec:
    """
    Refit how pools on shared cores slow each other down, to the steps of a load.

        t / t_alone = s + g L (prefill), s + f u + h j / t_alone (decode)   (docs/model.md, eq. C5)

    s scales the steps timed alone, whose shape stays; L sequences that decode holds, u whether
    prefill computes, j requests that join. Prefill's own constants f_p and h_p, which no such load
    tells from s, become 0.

    Returns:
        The constants; unchanged for a pool of which too few steps are known, with the least
        beside them or with more, or whose steps have nothing to do with what was in them.
    """
    prefill, decode, between = before.prefill, before.decode, before.interference
    model = StepModel.calibrated(replace(before, interference=Interference()))
    timed = steps.get("prefill")
    if timed is not None and timed.undisturbed is not None:
        slower, sequences = _slower(model, "prefill", timed, joins=False)
        if not slower:
            return before
        prefill = prefill.scaled(slower)
        between = replace(
            between,
            prefill_fraction=0.0,
            prefill_per_request_s=0.0,
            prefill_per_sequence_fraction=sequences / slower,
        )
    timed = steps.get("decode")
    if timed is not None and timed.undisturbed is not None:
        slower, busy, joins_s = _slower(model, "decode", timed, joins=True)
        if not slower:
            return before
        decode = decode.scaled(slower)
        between = replace(between, decode_fraction=busy / slower, decode_per_request_s=joins_s)
    return replace(before, prefill=prefill, decode=decode, interference=between)


def _slower(model: StepModel, role: str, timed: TimedSteps, *, joins: bool) -> list[float]:
    """
    Fit seconds = s alone + x alone beside + h joined by least squares, none of them negative.

    The one step in fifty that is farthest from a first fit is left out of the second: it met
    something else on the machine.
    """
    alone_s = modelled_s(model, role, timed)
    terms = [alone_s, alone_s * timed.beside, *([timed.joined] if joins else [])]
    design, chosen = np.column_stack(terms), np.ones(len(alone_s), dtype=bool)
    for _ in range(2):
        found = nonnegative_least_squares(design[chosen], timed.seconds[chosen])
        apart = np.abs(timed.seconds - design @ found)
        chosen = apart <= np.quantile(apart, 1 - OUTLIERS)
    return [float(value) for value in found]


def step_gaps(model: StepModel, steps: Mapping[str, TimedSteps]) -> list[float]:
    """
    Return ln modelled - ln measured seconds of the steps of each pool.

    Steps with the least and steps with more beside them count apart, where there are enough of
    both: that is what tells steps from interference.
    """
    gaps = []
    for role, timed in steps.items():
        if len(timed.seconds) < FEWEST:
            continue
        modelled, alone = modelled_s(model, role, timed), timed.undisturbed
        groups = (np.isfinite(modelled),) if alone is None else (alone, ~alone)
        gaps += [
            float(np.log(modelled[group].sum() / timed.seconds[group].sum())) for group in groups
        ]
    return gaps
