"""
Time the step model: microseconds per step on a grid, and of one step alone.

    python benchmarks/step_model.py

Limits: 50 us per point of a grid, 2 ms alone.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.load import decode_load, prefill_load
from sizing.latency.step import Machine, step_s

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = (("llama-3.1-70b", "h100-sxm", 8), ("deepseek-v3", "h200-sxm", 8))
GRID = 2000
LIMITS_S = {"alone": 2e-3, "on a grid": 50e-6}
TRIES = 7


def main() -> int:
    """Print both, and whether they keep their limits."""
    slow = False
    for model, gpu, tp in CASES:
        spec = catalog.find_gpu(gpu)
        cluster = next(c for c in catalog.clusters().values() if c.gpu == spec.name)
        machine = Machine(
            model=catalog.find_model(model),
            gpu=spec,
            cluster=cluster,
            engine=catalog.engines()[0].on(spec),
        )
        slicing = Slicing(tp=tp)
        tokens, batches = np.geomspace(1, 32_000, GRID), np.geomspace(1, 512, GRID)
        for name, points, load in (
            ("alone", 1, prefill_load(4000)),
            ("alone", 1, decode_load(64, 4000)),
            ("on a grid", GRID, prefill_load(tokens)),
            ("on a grid", GRID, decode_load(batches, 4000)),
        ):
            seconds = _best(partial(step_s, machine, load, slicing=slicing)) / points
            phase = "prefill" if float(np.max(load.prompts)) else "decode"
            ratio = seconds / LIMITS_S[name]
            slow |= ratio > 1
            print(f"{model:15} {phase:8} {name:10} {seconds * 1e6:8.2f} us, {ratio:.2f} of limit")
    return int(slow)


def _best(run: Callable[[], object]) -> float:
    """Shortest of several runs: what the code takes while nothing else takes the core."""
    found = []
    for _ in range(TRIES):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
