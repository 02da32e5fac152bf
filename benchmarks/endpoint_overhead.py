"""
What the endpoint costs: the same requests, in turn, to ours and to others with the same engines.

    python benchmarks/endpoint_overhead.py bare   ours, a bare vLLM server, a bare pair
    python benchmarks/endpoint_overhead.py ray    ours, Ray's PD app, the same without batching

Limits: median TTFT over the bare pair's at most the larger of 10 % and 15 ms; better than Ray's
app with its defaults, not worse than it without batching. All of them run at once, on two cores,
and sleep while another is asked (docs/adr/0101).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from endpoints.bare import servers, split_stream
from endpoints.client import Sample, body, stream
from endpoints.demo import away, demo, pool, up

from minicluster.errors import Exit, TargetFailed
from minicluster.plan import Placement, to_json
from serving.cluster.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from minicluster.plan import Deployment

    Ask = Callable[[aiohttp.ClientSession, dict[str, Any]], Awaitable[Sample]]

PROMPT_TOKENS, OUTPUT_TOKENS = 84, 10
FIRST_ID, LAST_ID = 2400, 4300
WARM_UP = 10
RAY_PD = Path(__file__).parent / "endpoints" / "ray_pd.py"


def main() -> int:
    """Start everything, ask in turn, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("against", choices=("bare", "ray"))
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    with away() as model, ExitStack() as stack:
        core = [Placement(node="first", gpus=(number,)) for number in (0, 1)]
        deployment = demo(model, pool("prefill", core[0]), pool("decode", core[1]))
        ours = stack.enter_context(up(deployment))
        systems: dict[str, Ask] = {"ours": partial(_ask, ours)}
        if given.against == "bare":
            alone = replace(deployment.pool("decode"), role="mixed")
            urls = stack.enter_context(
                servers(deployment, (*deployment.pools, alone), model.parent)
            )
            systems["bare pair"] = partial(_ask_pair, urls[:2])
            systems["bare server"] = partial(_ask, urls[2])
        else:
            for interval in ("default", "0"):
                url = stack.enter_context(_ray_pd(deployment, interval, model.parent))
                systems[f"ray pd, batching {interval}"] = partial(_ask, url)
        found = asyncio.run(_in_turn(systems, given.rounds))
    return _judge(found)


async def _ask(url: str, session: aiohttp.ClientSession, asked: dict[str, Any]) -> Sample:
    return await stream(session, url, asked, 0.0, time.perf_counter())


async def _ask_pair(
    urls: list[str], session: aiohttp.ClientSession, asked: dict[str, Any]
) -> Sample:
    return await split_stream(session, urls, asked)


async def _in_turn(systems: dict[str, Ask], rounds: int) -> dict[str, list[Sample]]:
    """Ask one after the other, every time with a new prompt; the first rounds do not count."""
    rng = np.random.default_rng(1)
    found: dict[str, list[Sample]] = {name: [] for name in systems}
    async with aiohttp.ClientSession() as session:
        for number in range(rounds + WARM_UP):
            for name, ask in systems.items():
                prompt = rng.integers(FIRST_ID, LAST_ID, size=PROMPT_TOKENS)
                sample = await ask(session, body("demo", prompt, OUTPUT_TOKENS))
                if sample.status != 200:  # noqa: PLR2004
                    raise TargetFailed(f"{name} answered {sample.status}")
                if number >= WARM_UP:
                    found[name].append(sample)
    return found


@contextmanager
def _ray_pd(deployment: Deployment, interval: str, place: Path) -> Iterator[str]:
    given = place / "deployment.json"
    given.write_text(to_json(deployment))
    [port] = free_ports(1)
    with (place / f"ray-{interval}.txt").open("w") as log:
        app = subprocess.Popen(  # noqa: S603
            [sys.executable, RAY_PD, given, str(port), interval],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert app.stdin is not None  # noqa: S101  (for the type checker)
            assert app.stdout is not None  # noqa: S101
            if not any(line == "ready\n" for line in app.stdout):
                raise TargetFailed((place / f"ray-{interval}.txt").read_text()[-2000:])
            yield f"http://127.0.0.1:{port}"
        finally:
            app.stdin.close()
            app.wait(timeout=90)


def _judge(found: dict[str, list[Sample]]) -> int:
    """Print medians, and whether the limits are kept."""
    medians = {}
    for name, samples in found.items():
        ttft_ms = [sample.ttft_s * 1e3 for sample in samples]
        medians[name] = statistics.median(ttft_ms)
        whole_s = [s.ttft_s + s.tpot_s * (OUTPUT_TOKENS - 1) for s in samples]
        print(
            f"{name:24} TTFT p50 {medians[name]:7.1f} ms, p95 {np.quantile(ttft_ms, 0.95):7.1f} ms;"
            f" {OUTPUT_TOKENS / statistics.median(whole_s):6.1f} tokens/s; {len(samples)} requests"
        )
    ours, holds = medians["ours"], True
    if "bare pair" in medians:
        limit_ms = max(0.1 * medians["bare pair"], 15.0)
        over_ms = ours - medians["bare pair"]
        holds = over_ms <= limit_ms
        print(f"over the bare pair: {over_ms:.1f} ms, limit {limit_ms:.1f} ms")
    for name, median_ms in medians.items():
        if name.startswith("ray"):
            holds &= ours <= median_ms
            print(f"ours is {ours / median_ms:.2f} of {name}")
    print("kept" if holds else "MISSED")
    return Exit.DONE if holds else Exit.NEGATIVE


if __name__ == "__main__":
    raise SystemExit(main())
