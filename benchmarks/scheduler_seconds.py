"""
How long vLLM's scheduler takes for a step of sequences that decode, without a model.

Between two steps an engine that does not schedule ahead plans the next step, notes the tokens of
the last and encodes them for its API server, while the GPU waits (`exposed_sequence_s` of
configs/engines/vllm-0.15.toml). Run from the repository with the engine installed:

    python -m benchmarks.scheduler_seconds
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackEncoder

from tests.serving.simulated.vllm_scheduler import MODEL, Engine

BATCHES = (1, 8, 32, 64, 128, 256)
INPUT_TOKENS, OUTPUT_TOKENS = 200, 400
STEPS, WARM_UP_STEPS = 120, 20
STEP = {
    "base_s": 1e-3, "stream_s": 1e-3, "per_prefill_token_s": 1e-5, "per_sequence_s": 2e-4,
    "per_pair_s": 1e-7, "per_context_token_s": 1e-6, "max_tokens": 1, "max_batch": 1,
    "max_context_tokens": 1, "error_fraction": 0.0,
}  # fmt: skip


def engine_of(batch: int, model: str) -> Engine:
    """Return a scheduler to which *batch* requests have been added."""
    limits = {
        "block_size": 16, "kv_blocks": 200 * batch + 100, "max_num_seqs": batch,
        "max_num_batched_tokens": 8192,
        "options": {"chunked_prefill_tokens": 0, "watermark_fraction": 0.0},
    }  # fmt: skip
    case = {
        "limits": limits, "step": STEP, "prefix_caching": True, "due_s": [0.0] * batch,
        "input_tokens": [INPUT_TOKENS] * batch, "output_tokens": [OUTPUT_TOKENS] * batch,
        "prefix": [0] * batch, "content": [()] * batch, "pull_s": None,
    }  # fmt: skip
    engine = Engine(case, model)
    engine.take(0.0)
    return engine


def step_s(engine: Engine) -> float:
    """Return the CPU time of one step: plan it, tell its tokens, encode what is answered."""
    encoder, start = MsgpackEncoder(), time.thread_time()
    plan = engine.scheduler.schedule()
    planned_s = time.thread_time() - start
    names = list(plan.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[[5] for _ in names],
    )
    start = time.thread_time()
    for outputs in engine.scheduler.update_from_output(plan, result).values():
        encoder.encode(outputs)
    return planned_s + time.thread_time() - start


def main() -> None:
    """Print the median over steps, and what it is for one sequence."""
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for batch in BATCHES:
            engine = engine_of(batch, model)
            seconds = float(np.median([step_s(engine) for _ in range(STEPS)][WARM_UP_STEPS:]))
            each = 1e6 * seconds / batch
            print(f"{batch:4d} sequences: {1e6 * seconds:7.1f} us, {each:5.1f} each", flush=True)


if __name__ == "__main__":
    main()
