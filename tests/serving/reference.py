"""One vLLM engine, no Ray and no transfer: what the split deployment is compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import Answer


def answers_of(
    place: Path, *, model: Path, dtype: str, prompts: list[list[int]], max_tokens: int
) -> list[Answer]:
    """
    Return what a single engine answers, one prompt at a time, greedily, as `client.Answer`s.

    The engine runs in a process of its own, on both cores, and is gone afterwards.
    """
    from .client import Answer  # noqa: PLC0415  (this file also runs by itself, as a command)

    job = {"model": str(model), "dtype": dtype, "max_tokens": max_tokens, "prompts": prompts}
    (place / "job.json").write_text(json.dumps(job))
    command = [sys.executable, __file__, place / "job.json", place / "answers.json"]
    both_cores = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    subprocess.run(command, env=both_cores, check=True, timeout=300)
    return [
        Answer(tokens=tuple(a["tokens"]), best_two=tuple(tuple(pair) for pair in a["best_two"]))
        for a in json.loads((place / "answers.json").read_text())
    ]


def main() -> None:
    """Answer a file's prompts; write tokens and the two best log-probabilities of each."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415  (vLLM starts this file once more)

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        block_size=32,
        max_model_len=2048,
        max_num_seqs=1,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=True,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], logprobs=2, ignore_eos=True
    )
    answers = []
    for prompt in job["prompts"]:
        [request] = engine.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
        [answer] = request.outputs
        best_two = [
            sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in answer.logprobs
        ]
        answers.append({"tokens": list(answer.token_ids), "best_two": best_two})
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
