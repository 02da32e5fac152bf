"""
Routing: outstanding prompt tokens against power-of-two choices, on the same load.

    python benchmarks/routing_compared.py [--seconds 90]

Two prefill replicas and one that decodes, on two cores; prompts of very different lengths, the
same at the same times for both. On two cores that three engines share the routers are compared,
not their speed. No limit: what the simulator says for the plan at hand decides.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
from endpoints.client import Sample, body, open_loop, percentile_ms, stream
from endpoints.demo import away, demo, pool, up

from minicluster.plan import Placement
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.arrivals import poisson_arrivals

if TYPE_CHECKING:
    from pathlib import Path

POLICIES = ("power-of-two", "least-tokens")
PROMPTS = Lengths(distribution="lognormal", median=120, sigma=1.1, high=1500)
OUTPUT_TOKENS = 2
BUSY = 0.65
"""Load as a fraction of the capacity of both prefill replicas without batching."""

FIRST_ID, LAST_ID = 2400, 4300
WARM_UP_S = 10.0


def main() -> int:
    """Deploy with one policy after the other, load, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--seconds", type=float, default=90.0)
    seconds = parser.parse_args().seconds
    rate: float | None = None
    found = {}
    with away() as model:
        for policy in POLICIES:
            with up(_deployment(model, policy)) as url:
                if rate is None:
                    rate = asyncio.run(_rate(url))
                found[policy] = asyncio.run(_run(url, rate, seconds))
    print(f"{rate:.2f} requests/s for {seconds:g} s, prompts of {PROMPTS.median:g} tokens (median)")
    base = found[POLICIES[0]]
    for policy, samples in found.items():
        ttft = [sample.ttft_s for sample in samples]
        errors = sum(sample.status != 200 for sample in samples)  # noqa: PLR2004
        parts = [f"mean {np.mean(ttft) * 1e3:7.1f} ms"]
        for share in (0.5, 0.95, 0.99):
            ratio = percentile_ms(ttft, share) / percentile_ms([s.ttft_s for s in base], share)
            parts.append(f"p{share * 100:.0f} {percentile_ms(ttft, share):7.1f} ms ({ratio:.2f})")
        print(f"{policy:13} TTFT {', '.join(parts)}; {len(ttft)} requests, {errors} errors")
    return 0


def _deployment(model: Path, policy: str):  # noqa: ANN202  (a Deployment)
    """Return two prefill replicas, each on a core, and decode beside the second."""
    prefill = pool(
        "prefill", Placement(node="first", gpus=(0,)), Placement(node="second", gpus=(1,))
    )
    decode = pool("decode", Placement(node="third", gpus=(1,)))
    return demo(model, prefill, decode, policy=policy)


async def _rate(url: str) -> float:
    """Return the rate at which both replicas are busy for `BUSY` of the time."""
    rng = np.random.default_rng(7)
    sizes = np.clip(np.exp(rng.normal(np.log(PROMPTS.median or 1), PROMPTS.sigma, 30)), 1, 1500)
    async with aiohttp.ClientSession() as session:
        started = time.perf_counter()
        for size in sizes.astype(int):
            asked = body("demo", rng.integers(FIRST_ID, LAST_ID, size=size), OUTPUT_TOKENS)
            await stream(session, url, asked, 0.0, time.perf_counter())
        mean_s = (time.perf_counter() - started) / len(sizes)
    return BUSY * 2 / mean_s


async def _run(url: str, rate: float, seconds: float) -> list[Sample]:
    """Load; return what was due after the warm-up."""
    load = WorkloadSpec(
        requests_per_s=rate, input_tokens=PROMPTS, output_tokens=Lengths.fixed(OUTPUT_TOKENS)
    )
    arrivals = poisson_arrivals(load, duration_s=WARM_UP_S + seconds, seed=3)
    rng = np.random.default_rng(5)
    asked = [
        body("demo", rng.integers(FIRST_ID, LAST_ID, size=size), OUTPUT_TOKENS)
        for size in arrivals.input_tokens
    ]
    samples = await open_loop(url, asked, arrivals.due_s.tolist())
    return [sample for sample in samples if sample.due_s > WARM_UP_S]


if __name__ == "__main__":
    raise SystemExit(main())
