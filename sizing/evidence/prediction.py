"""Prediction of one measured row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError, NegativeAnswer
from sizing.evidence.bound import row_bounds
from sizing.evidence.row import kind_of, path_of
from sizing.evidence.row_config import RowConfig, row_config
from sizing.evidence.row_system import one_request, queues_of, row_arrivals, row_system
from sizing.simulation.outcome import simulate

if TYPE_CHECKING:
    from minicluster.workload.arrivals import Arrivals
    from sizing.evidence.row import MeasuredRow
    from sizing.simulation.outcome import Outcome
    from sizing.simulation.system import System

OVERLOAD_S = 10.0
OVERLOAD_RATIO = 10.0
"""A TTFT above both that the KV cache or the rate causes is called infeasible."""
SPARE_FRACTION = 1.2
"""Infeasible only if the replica is overloaded with this much more KV cache, too."""
FASTER = 1.2, 1.05, 1.1, 1.15
"""Steps so many times as fast are tried where an open loop queues, the fastest first."""
TAIL = 0.99
"""Share of the requests that the latencies of the tail are above."""
SEED = 1
"""Seed of the simulation; no row has a policy that draws, so that it changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """
    The prediction of one row.

    Attributes:
        status: `predicted`, `infeasible` or `unsupported`.
        reason: of the latter two; of `predicted`, what it was not sure of.
        ttft_s: in the row's statistic; `None` unless predicted.
        unloaded_s: predicted prefill of one prompt alone; of infeasible rows.
        path: labels from coarse to fine, by which residuals are grouped.
        stand_in: computed with the constants of another version, or of another engine.
        bounds_s: what `ttft` and `tpot` cannot be measured below, where that is known.
    """

    status: str
    reason: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    unloaded_s: float | None = None
    path: tuple[str, ...] = ()
    stand_in: bool = False
    bounds_s: dict[str, float] = field(default_factory=dict)


def predict_row(row: MeasuredRow) -> RowPrediction:
    """Predict one row (docs/model.md, eq. V1); what cannot be is `unsupported` with the reason."""
    try:
        config = row_config(row)
        found = _predicted(row, config)
    except InputError as error:
        return RowPrediction(status="unsupported", reason=str(error))
    except NegativeAnswer as error:  # the simulation found that the row cannot be served
        return RowPrediction(status="infeasible", reason=str(error))
    path = path_of(
        *(kind_of(row), row.engine, config.machine.model),
        name=row.model,
        gpu=row.gpu,
        configuration=row.configuration,
    )
    notes = "; ".join(filter(None, (found.reason, config.acceptance, *config.notes)))
    return replace(
        found,
        reason=notes,
        path=path,
        stand_in=bool(config.notes),
        bounds_s=row_bounds(row, config.machine),
    )


def _predicted(row: MeasuredRow, config: RowConfig) -> RowPrediction:
    """Simulate the row's load on its system; split pools whole, else one of its equal queues."""
    split = len(row.groups) > 1
    if split and row.load != "closed":
        raise InputError(f"{row.place}: load", row.load, "closed, of a disaggregated row")
    arrivals = row_arrivals(row, queues=1 if split else queues_of(row))
    system = row_system(row, config)
    found = simulate(system, arrivals, seed=SEED)
    if row.load == "static":
        return _of_batch(row, found)
    note = ""
    if row.load == "open":
        found, note = _at_the_edge(row, config, arrivals, found)
    if not (split or note):
        overload = _overload(row, config, system, found)
        if overload is not None:
            return overload
    read = np.mean if row.statistic == "mean" else np.median
    tpot_s = found.tpot_s[found.output_tokens > 1]
    return RowPrediction(
        status="predicted",
        reason=note,
        ttft_s=float(read(found.ttft_s)),
        tpot_s=float(read(tpot_s)) if len(tpot_s) else None,
        ttft_p99_s=float(np.quantile(found.ttft_s, TAIL)),
        tpot_p99_s=float(np.quantile(tpot_s, TAIL)) if len(tpot_s) else None,
    )


def _at_the_edge(
    row: MeasuredRow, config: RowConfig, arrivals: Arrivals, found: Outcome
) -> tuple[Outcome, str]:
    """
    Return an open loop's run, and a note where its load is at the edge of capacity (eq. V6).

    There a queue that hardly forms and one that grows without end are a few per cent of a step
    apart, less than steps are known to. Who measures an open loop chooses a rate that is served:
    the slowest steps within the error that serve it are taken.
    """
    alone = simulate(row_system(row, config), one_request(row), seed=SEED)
    limit_s = OVERLOAD_RATIO * float(alone.ttft_s[0])
    if found.ttft_s.mean() <= limit_s:
        return found, ""
    served, note = found, ""
    for faster in FASTER:
        system = row_system(row, config, slowness=1 / faster)
        again = simulate(system, arrivals, seed=SEED)
        if again.ttft_s.mean() > limit_s and not note:
            break
        if again.ttft_s.mean() > limit_s:
            continue
        served = again
        note = f"at the edge of capacity: steps taken to be {100 * (faster - 1):.0f} % faster"
        if faster < FASTER[0]:
            break
    return served, note


def _of_batch(row: MeasuredRow, found: Outcome) -> RowPrediction:
    """Read a static batch as it is measured, TTFT and the tokens after it of all together (V3)."""
    ttft_s, e2e_s = float(found.ttft_s.max()), float(found.e2e_s.max())
    tpot_s = (e2e_s - ttft_s) / (row.osl - 1) if row.osl > 1 else None
    return RowPrediction(status="predicted", ttft_s=ttft_s, tpot_s=tpot_s)


def _overload(
    row: MeasuredRow, config: RowConfig, system: System, found: Outcome
) -> RowPrediction | None:
    """Call a row infeasible whose requests queue, with a little more KV cache as well."""
    ttft_s = float(found.ttft_s.mean())
    if ttft_s <= OVERLOAD_S:
        return None
    unloaded_s = float(simulate(system, one_request(row), seed=SEED).ttft_s[0])
    limit_s = max(OVERLOAD_S, OVERLOAD_RATIO * unloaded_s)
    roomier = row_system(row, config, spare=SPARE_FRACTION)
    again = simulate(roomier, row_arrivals(row, queues=queues_of(row)), seed=SEED)
    if min(ttft_s, float(again.ttft_s.mean())) <= limit_s:
        return None
    tokens = system.decode.limits.max_tokens
    return RowPrediction(
        status="infeasible",
        reason=f"requests queue for {ttft_s:.0f} s: the KV cache holds {tokens:,} tokens a rank",
        unloaded_s=unloaded_s,
    )
