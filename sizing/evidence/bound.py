"""Physical bounds of a measured row: weights read over peak bandwidth, FLOPs over peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.specs.model import DTYPE_BYTES
from minicluster.specs.parameters import parameters
from sizing.evidence.protocol import protocol_of

if TYPE_CHECKING:
    from minicluster.specs.gpu import GpuSpec
    from minicluster.specs.model import ModelSpec
    from minicluster.specs.slicing import Slicing
    from sizing.evidence.row import MeasuredRow
    from sizing.latency.step import Machine


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
    parts = _parts(model, slicing, tokens)
    parts.append((model.vocab_size * model.hidden_size, model.dtype, slicing.tp, 1.0,
                  tokens if outputs is None else outputs))  # fmt: skip
    read_bytes = sum(
        count * DTYPE_BYTES[dtype] * (1 - (1 - used) ** tokens) / ways
        for count, dtype, ways, used, _ in parts
    )
    gpus = slicing.gpus
    compute_s = sum(
        2 * count * used * rows / (gpus * _fastest(gpu, dtype))
        for count, dtype, _, used, rows in parts
    )
    return float(max(read_bytes / gpu.require("hbm_bytes_per_s"), compute_s))


def _parts(
    model: ModelSpec, slicing: Slicing, tokens: float
) -> list[tuple[float, str, int, float, float]]:
    """Parameters of all layers, dtype, GPUs that share them, share used by a token, tokens."""
    counts, moe = parameters(model), model.moe
    used = moe.experts_per_token / moe.num_experts if moe else 0.0
    return [
        (counts.attention, model.attention_dtype, slicing.tp, 1.0, tokens),
        (counts.dense_ffn, model.dense_dtype, slicing.tp, 1.0, tokens),
        (counts.shared_experts, model.shared_dtype, slicing.tp, 1.0, tokens),
        (counts.experts, model.weight_dtype, slicing.tp * slicing.dp, used, tokens),
    ]


def _fastest(gpu: GpuSpec, dtype: str) -> float:
    """Peak of the fastest units of the GPU that are not narrower than the weights."""
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
