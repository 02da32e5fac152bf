"""
The whole loop on one GPU: two vLLM engines share it; predicted beside measured at two loads.

    python benchmarks/gpu_loop.py --out FOLDER             # on an H200; estimated: 9 minutes
    python benchmarks/gpu_loop.py --out FOLDER --dry-run   # here, with simulated engines

A prefill and a decode engine have 40 % of GPU 0 each (`MINICLUSTER_GPUS=0,0`: the plan's GPUs 0 and
1 are one), and KV caches go by NIXL. Steps: a model of random weights, `sizing calibrate
--engine`, `sizing plan`, `serving up`, and `loadtest run` twice. FOLDER has steps.jsonl, how each
command ended, and errors.json, the statistics of each load as soon as it is judged; every command
has a limit. The dry run types the same commands, with engines whose step times are drawn
(foreign_engines.py) and no model's weights.

Needs, beside this repository's packages, vLLM with CUDA, Ray and NIXL. Exit code 1 if an error is
beyond 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from foreign_engines import draw_engines, judged, loop, write_scenario

from minicluster.files import write_atomically
from serving.deployment.mapped_gpus import GPUS
from serving.measurement.demo_model import DemoShape, make_demo_model, model_config

SHAPE = DemoShape(
    num_layers=28,
    hidden_size=3072,
    ffn_size=8192,
    num_heads=24,
    num_kv_heads=8,
    max_context_tokens=8192,
)
"""Llama 3.2 3B but for its vocabulary: 5.6 GB, written in under a minute."""

SHARES, LOAD_S = (0.3, 0.6), 60.0

NEEDED = ("torch", "vllm", "ray", "nixl")

ENGINE = "gpu_memory_utilization = 0.4\nmax_num_seqs = 8"
"""Few sequences: one endpoint and one client pass on some 3,000 tokens per second, and a step of
this model takes 2 to 3 ms."""

DRY_SLOWER = 3.0
"""How much slower than a GPU's the simulated steps are, for the same reason on two cores."""


def main() -> int:
    """Run the loop on the GPU, or dry; print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("--out", type=Path, default=Path("out/gpu-loop"))
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    out: Path = asked.out
    out.mkdir(parents=True, exist_ok=True)
    os.environ[GPUS] = "0,0"
    model, slower = out.absolute() / "model", DRY_SLOWER if asked.dry_run else 1.0
    if asked.dry_run:
        model.mkdir(exist_ok=True)
        write_atomically(model / "config.json", json.dumps(model_config(SHAPE, "bf16")))
    else:
        if lacking := [name for name in NEEDED if find_spec(name) is None]:
            parser.error(f"not installed here: {', '.join(lacking)}")
        make_demo_model(model, SHAPE)
    rate = write_scenario(out, str(model), slower, ENGINE)
    engines = draw_engines(out, 1, slower) if asked.dry_run else ()
    return judged(loop(out, engines, rate=rate, shares=SHARES, load_s=LOAD_S))


if __name__ == "__main__":
    sys.exit(main())
