"""Prediction of one measured row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError
from sizing.evidence.load import (
    OPEN_REQUESTS,
    REQUEST_S,
    REQUESTS_PER_USER,
    arrivals,
    repeated,
    requests,
)
from sizing.evidence.protocol import protocol_of, recipe_of
from sizing.evidence.replay import ReplayedReplica, RowReplay, Served
from sizing.evidence.row import kind_of, path_of
from sizing.evidence.row_config import RowConfig, row_config
from sizing.evidence.steps import StepTable, seconds_of, step_table
from sizing.evidence.tandem import tandem
from sizing.latency.load import StepLoad

if TYPE_CHECKING:
    from minicluster.specs.slicing import Slicing
    from sizing.evidence.row import Group, MeasuredRow

OVERLOAD_S = 10.0
OVERLOAD_RATIO = 10.0
"""A TTFT above both that the KV cache or the rate causes is called infeasible."""
SPARE_FRACTION = 1.2
"""Infeasible only if the replica is overloaded with this much more KV cache, too."""
CONTEXT_POINTS = 9
_TABLES: dict[object, StepTable] = {}


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
        num_layers: of the model; what per-layer corrections are multiplied with.
    """

    status: str
    reason: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_p99_s: float | None = None
    unloaded_s: float | None = None
    path: tuple[str, ...] = ()
    stand_in: bool = False
    num_layers: int = 0


def predict_row(row: MeasuredRow) -> RowPrediction:
    """Predict one row; what cannot be is `unsupported` with the reason."""
    try:
        config = row_config(row)
        if row.load == "static":
            found = _static(row, config)
        elif len(row.groups) == 1:
            found = _loaded(row, config, row.groups[0])
        else:
            found = _split(row, config)
    except InputError as error:
        return RowPrediction(status="unsupported", reason=str(error))
    path = path_of(kind_of(row), row.engine, config.machine.model)
    notes = "; ".join(filter(None, (found.reason, *config.notes)))
    return replace(
        found,
        reason=notes,
        path=path,
        stand_in=bool(config.notes),
        num_layers=config.machine.model.num_layers,
    )


def _static(row: MeasuredRow, config: RowConfig) -> RowPrediction:
    """One batch, all prompts together: prefill steps, then one decode step a token (eq. V3)."""
    group = row.groups[0]
    batch = max(1.0, row.amount / group.slicing.dp)
    budget = config.token_budget if config.rules.chunked_prefill else math.inf
    new = row.isl - row.prefix_tokens
    per_step = max(1.0, min(batch, budget // new)) if new <= budget else 1.0
    full, rest = divmod(batch, per_step)
    loads = [(full, per_step)] + ([(1.0, rest)] if rest else [])
    ttft = sum(
        count * _prefill_s(config, group.slicing, size, new, row.prefix_tokens, budget)
        for count, size in loads
    )
    tpot = None
    if row.osl > 1:
        contexts = np.linspace(row.isl + 1, row.isl + row.osl - 1, CONTEXT_POINTS)
        none = np.zeros_like(contexts)
        load = StepLoad(
            prompts=none,
            prompt_tokens=none,
            cached_tokens=none,
            sequences=none + batch,
            context_tokens=contexts,
        )
        tpot = float(
            np.trapezoid(seconds_of(config.machine, load, group.slicing)) / (len(none) - 1)
        )
    return RowPrediction(status="predicted", ttft_s=float(ttft), tpot_s=tpot)


def _prefill_s(
    config: RowConfig, slicing: Slicing, prompts: float, new: int, cached: int, budget: float
) -> float:
    """Seconds to prefill prompts together, in chunks where one is larger than the budget."""
    chunks = max(1, math.ceil(new / budget))
    sizes = np.full(chunks, new / chunks)
    none = np.zeros_like(sizes)
    load = StepLoad(
        prompts=none + prompts,
        prompt_tokens=sizes,
        cached_tokens=cached + np.cumsum(sizes) - sizes,
        sequences=none,
        context_tokens=none,
    )
    return float(seconds_of(config.machine, load, slicing).sum())


def _loaded(row: MeasuredRow, config: RowConfig, group: Group) -> RowPrediction:
    """
    Users or arrivals at one replica (eq. V2).

    Attention ranks share them, and so do the batches that are under way in a pipeline, one a stage.
    """
    ranks = group.slicing.dp * group.slicing.pp
    found = served(row, config, group, ranks=ranks)
    ttft = float(np.mean([each.first_s - each.sent_s for each in found]))
    unloaded = _prefill_s(
        config, group.slicing, 1.0, row.isl - row.prefix_tokens, row.prefix_tokens,
        config.token_budget,
    )  # fmt: skip
    if ttft > OVERLOAD_S and ttft > OVERLOAD_RATIO * unloaded:
        again = served(row, config, group, ranks=ranks, spare=SPARE_FRACTION)
        with_spare = float(np.mean([each.first_s - each.sent_s for each in again]))
        if with_spare > OVERLOAD_S and with_spare > OVERLOAD_RATIO * unloaded:
            return RowPrediction(
                status="infeasible",
                reason=f"requests queue for {ttft:.0f} s: the KV cache holds"
                f" {config.kv_tokens(group.slicing, row.isl + row.osl / 2):,.0f} tokens a rank",
                unloaded_s=unloaded,
            )
    return _statistics(found, row.statistic)


def _split(row: MeasuredRow, config: RowConfig) -> RowPrediction:
    """Prefill and decode pools under a closed loop (eq. V4)."""
    if row.load != "closed":
        raise InputError(f"{row.place}: load", row.load, "closed, of a disaggregated row")
    return _statistics(tandem(row, config), row.statistic)


def served(
    row: MeasuredRow, config: RowConfig, group: Group, *, ranks: int, spare: float = 1.0
) -> list[Served]:
    """Replay the share of the row's load that one attention rank and pipeline batch has."""
    users = max(1, math.ceil(row.amount / ranks)) if row.load == "closed" else 0
    protocol, recipe = protocol_of(row), recipe_of(row)
    engine = config.machine.engine
    replica = ReplayedReplica(
        steps=_table(config, group.slicing, users or 256, row.isl + row.osl),
        rules=config.rules,
        max_num_seqs=engine.max_num_seqs if protocol is None else protocol.max_batch_size,
        token_budget=recipe.token_budget if recipe else config.token_budget,
        kv_tokens=config.kv_tokens(group.slicing, row.isl + row.osl / 2) * spare / group.slicing.pp,
        overhead_s=REQUEST_S,
        ahead=config.async_scheduling,
        wait_steps=recipe.wait_steps if recipe else 0,
        wait_fraction=recipe.wait_fraction if recipe else 0.0,
    )
    count = users * REQUESTS_PER_USER or OPEN_REQUESTS
    if protocol is not None:
        count = math.ceil(row.amount / ranks * protocol.stage_s)
    drawn = requests(
        count, isl=row.isl, osl=row.osl, jitter=row.length_jitter, prefix=row.prefix_tokens
    )
    if protocol is not None:
        drawn = repeated(drawn, protocol.cold(row.amount))
    at = None if users else arrivals(count, row.amount / ranks)
    return RowReplay(replica, drawn, at, users).run()


def _table(config: RowConfig, slicing: Slicing, sequences: int, context: int) -> StepTable:
    """Return the step table for a load, made once per machine and rounded-up range."""
    b = 2 ** math.ceil(math.log2(max(sequences, 4)))
    s = 2 ** math.ceil(math.log2(max(context, 256)))
    m = config.machine
    key = (m.model, m.gpu.name, m.cluster.name, m.engine.name, m.engine.version, slicing, b, s)
    if key not in _TABLES:
        _TABLES[key] = step_table(m, slicing, max_sequences=b, max_context=s)
    return _TABLES[key]


def _statistics(found: list[Served], statistic: str) -> RowPrediction:
    read = np.mean if statistic == "mean" else np.median
    ttft = np.array([each.first_s - each.sent_s for each in found])
    tpot = [(e.last_s - e.first_s) / (e.output - 1) for e in found if e.output > 1]
    return RowPrediction(
        status="predicted",
        ttft_s=float(read(ttft)),
        tpot_s=float(read(tpot)) if tpot else None,
        ttft_p99_s=float(np.quantile(ttft, 0.99)),
    )
