"""Prediction of one measured row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import InputError, NegativeAnswer
from minicluster.specs.model import DTYPE_BYTES
from minicluster.specs.parameters import parameters
from sizing.evidence.measured_row import MeasuredRow, kind_of
from sizing.evidence.protocol import protocol_of
from sizing.evidence.row_config import RowConfig, row_config
from sizing.evidence.row_system import one_request, queues_of, row_arrivals, row_system
from sizing.planner.intervals import Labels, PredictionInterval, labels_of
from sizing.simulation.outcome import Outcome, simulate_system

if TYPE_CHECKING:
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.slicing import Slicing
    from minicluster.workload.arrivals import Arrivals
    from sizing.latency.term import Machine
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
        bounds_s: what `ttft` and `tpot` cannot be measured below, where that is known.
    """

    status: str
    reason: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    unloaded_s: float | None = None
    labels: Labels = field(default_factory=Labels)
    bounds_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVerdict:
    """
    One line of the file, predicted.

    Attributes:
        row: `None`: the line could not be read.
        ttft: interval around the prediction; `None`: no prediction, or no row stands behind one.
        excluded: why the row is left out of errors and intervals; empty: it is not.
    """

    id: str
    source: str
    row: MeasuredRow | None
    found: RowPrediction
    ttft: PredictionInterval | None = None
    tpot: PredictionInterval | None = None
    excluded: str = ""

    @property
    def answered(self) -> bool | None:
        """True where the row counts as answered; `None` where nothing was measured."""
        if self.row is None or self.found.status == "unsupported":
            return False
        if self.found.status == "infeasible":  # it claims a TTFT above both limits
            if self.row.ttft_s is None:
                return None
            unloaded_s = self.found.unloaded_s or math.inf
            return self.row.ttft_s > min(OVERLOAD_S, OVERLOAD_RATIO * unloaded_s)
        return all(
            getattr(self.found, name) is not None
            for name in ("ttft_s", "tpot_s")
            if getattr(self.row, name) is not None
        )


def predict_row(row: MeasuredRow) -> RowPrediction:
    """Predict one row (docs/model.md, eq. V1); what cannot be is `unsupported` with the reason."""
    try:
        config = row_config(row)
        found = _predicted(row, config)
    except InputError as error:
        return RowPrediction(status="unsupported", reason=str(error))
    except NegativeAnswer as error:  # the simulation found that the row cannot be served
        return RowPrediction(status="infeasible", reason=str(error))
    labels = labels_of(
        *(kind_of(row), row.engine, row.engine_version, config.machine.model),
        name=row.model,
        gpu=row.gpu,
        configuration=row.configuration,
    )
    notes = "; ".join(filter(None, (found.reason, config.acceptance, *config.notes)))
    return replace(
        found,
        reason=notes,
        labels=labels,
        bounds_s=row_bounds(row, config.machine),
    )


def _predicted(row: MeasuredRow, config: RowConfig) -> RowPrediction:
    """Simulate the row's load on its system; split pools whole, else one of its equal queues."""
    split = len(row.groups) > 1
    if split and row.load != "closed":
        raise InputError(f"{row.place}: load", row.load, "closed, of a disaggregated row")
    arrivals = row_arrivals(row, queues=1 if split else queues_of(row))
    system = row_system(row, config)
    found = simulate_system(system, arrivals, seed=SEED, gaps=False)
    if row.load == "static":  # measured as one: TTFT and the tokens after it of all together (V3)
        ttft_s, e2e_s = float(found.ttft_s.max()), float(found.e2e_s.max())
        tpot_s = (e2e_s - ttft_s) / (row.osl - 1) if row.osl > 1 else None
        return RowPrediction(status="predicted", ttft_s=ttft_s, tpot_s=tpot_s)
    note = ""
    if row.load == "open":
        found, note = _at_the_edge(row, config, arrivals, found)
    if not (split or note):
        overload = _overload(row, config, system, found)
        if overload is not None:
            return overload
    read = np.mean if row.statistic == "mean" else np.median
    paces_s = found.tpot_s[found.output_tokens > 1]
    return RowPrediction(
        status="predicted",
        reason=note,
        ttft_s=float(read(found.ttft_s)),
        tpot_s=float(read(paces_s)) if len(paces_s) else None,
        ttft_p99_s=float(np.quantile(found.ttft_s, TAIL)),
        tpot_p99_s=float(np.quantile(paces_s, TAIL)) if len(paces_s) else None,
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
    alone = simulate_system(row_system(row, config), one_request(row), seed=SEED, gaps=False)
    limit_s = OVERLOAD_RATIO * float(alone.ttft_s[0])
    if found.ttft_s.mean() <= limit_s:
        return found, ""
    served, note = found, ""
    for faster in FASTER:
        system = row_system(row, config, slowness=1 / faster)
        again = simulate_system(system, arrivals, seed=SEED, gaps=False)
        if again.ttft_s.mean() > limit_s and not note:
            break
        if again.ttft_s.mean() > limit_s:
            continue
        served = again
        note = f"at the edge of capacity: steps taken to be {100 * (faster - 1):.0f} % faster"
        if faster < FASTER[0]:
            break
    return served, note


def _overload(
    row: MeasuredRow, config: RowConfig, system: System, found: Outcome
) -> RowPrediction | None:
    """Call a row infeasible whose requests queue, with a little more KV cache as well."""
    ttft_s = float(found.ttft_s.mean())
    if ttft_s <= OVERLOAD_S:
        return None
    unloaded_s = float(simulate_system(system, one_request(row), seed=SEED, gaps=False).ttft_s[0])
    limit_s = max(OVERLOAD_S, OVERLOAD_RATIO * unloaded_s)
    roomier = row_system(row, config, spare=SPARE_FRACTION)
    again = simulate_system(
        roomier, row_arrivals(row, queues=queues_of(row)), seed=SEED, gaps=False
    )
    if min(ttft_s, float(again.ttft_s.mean())) <= limit_s:
        return None
    tokens = system.decode.limits.max_tokens
    return RowPrediction(
        status="infeasible",
        reason=f"requests queue for {ttft_s:.0f} s: the KV cache holds {tokens:,} tokens a rank",
        unloaded_s=unloaded_s,
    )


def step_bound_s(
    machine: Machine, slicing: Slicing, tokens: float, *, outputs: float | None = None
) -> float:
    """
    Return the time that no step of a replica can be shorter than (docs/model.md, eq. V7).

        t >= max(sum_i P_i w_i u_i / (n_i BW), sum_i 2 P_i a_i m_i / (tp dp pp F_i))

    Args:
        machine: the model and GPU that a row names.
        slicing: of one replica; a token passes all stages of a pipeline.
        tokens: m, that all attention ranks of the replica compute together in the step.
        outputs: tokens that are multiplied with the output projection; `None`: all.

    Returns:
        Seconds. P_i are the parameters of attention, feed-forwards, experts and the output
        projection, w_i their bytes, n_i the GPUs of a stage that share them, F_i the peak of the
        fastest units that can multiply them; u_i = 1 - (1 - k / E)^m of the experts are read, and
        a_i = k / E of them are multiplied with a token; u_i = a_i = 1 for the others.

    Source:
        Each weight that is used is read once a step; datasheet peaks. Experts are drawn
        independently and equally often (occupancy).

    Ignores:
        KV cache, activations, scales of quantised weights, attention's own FLOPs, exchanges,
        launches: each would raise the bound. That fewer experts are read if some are popular.
    """
    gpu, model = machine.gpu, machine.model
    counts, moe, tp = parameters(model), model.moe, slicing.tp
    chosen = moe.experts_per_token / moe.num_experts if moe else 0.0
    parts = (  # parameters of all layers, dtype, GPUs that share them, share a token uses, tokens
        (counts.attention, model.attention_dtype, tp, 1.0, tokens),
        (counts.dense_ffn, model.dense_dtype, tp, 1.0, tokens),
        (counts.shared_experts, model.shared_dtype, tp, 1.0, tokens),
        (counts.experts, model.weight_dtype, tp * slicing.dp, chosen, tokens),
        (model.vocab_size * model.hidden_size, model.dtype, tp, 1.0,
         tokens if outputs is None else outputs),
    )  # fmt: skip
    read_bytes = sum(
        count * DTYPE_BYTES[dtype] * (1 - (1 - used) ** tokens) / ways
        for count, dtype, ways, used, _ in parts
    )
    compute_s = sum(
        2 * count * used * rows / (slicing.gpus * _fastest(gpu, dtype))
        for count, dtype, _, used, rows in parts
    )
    return float(max(read_bytes / gpu.require("hbm_bytes_per_s"), compute_s))


def _fastest(gpu: GpuSpec, dtype: str) -> float:
    least = DTYPE_BYTES[dtype]
    return max(peak for name, peak in gpu.peak_flops_per_s.items() if DTYPE_BYTES[name] >= least)


def row_bounds(row: MeasuredRow, machine: Machine) -> dict[str, float]:
    """
    Return the bounds of a row's measured latencies, `ttft` and `tpot`, in seconds.

    A first token takes a step with one whole prompt, or with all prompts of a static batch; where
    prompts were sent before and may be cached there is no bound. Tokens after it take a step with
    as many sequences as decode at a time on average, by Little's law of the measured times.
    """
    bounds = {}
    mean = 1 - row.length_jitter / 2
    first, last = row.groups[0], row.groups[-1]
    if protocol_of(row) is None:
        prompts = row.amount / first.replicas if row.load == "static" else 1.0
        tokens = prompts * (mean * row.isl - row.prefix_tokens)
        bounds["ttft"] = step_bound_s(machine, first.slicing, max(1.0, tokens), outputs=1.0)
    decoding = max(1.0, _decoding(row, mean * row.osl) / last.replicas)
    bounds["tpot"] = step_bound_s(machine, last.slicing, decoding)
    return bounds


def _decoding(row: MeasuredRow, osl: float) -> float:
    """Sequences that decode at a time, in all replicas together; at least one where unknown."""
    if row.tpot_s is None or row.load == "static":
        return row.amount if row.load == "static" else 1.0
    decode_s = row.tpot_s * max(0.0, osl - 1)
    if row.load == "open":
        return row.amount * decode_s
    return row.amount * decode_s / (decode_s + row.ttft_s) if row.ttft_s else 1.0
