"""
Overload: several times the plan's rate against the plan's deployment, judged on what was admitted.

    python benchmarks/overload.py [PLAN] [--factor 3] [--seconds 60]

Limits: p99 of the admitted, and the SLO's own percentile, within its limits; goodput at least
90 % of the plan's rate; everything else refused with 429 at once. PLAN is `out/demo/plan.json`
(`make demo` leaves it) by default.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from endpoints.client import Sample, body, open_loop, percentile_ms

from minicluster.errors import Exit
from minicluster.plan import read_plan
from minicluster.workload.arrivals import poisson_arrivals
from serving.cluster.ports import free_ports
from serving.operations.deploy import Site, bring_up
from serving.operations.down import take_down

if TYPE_CHECKING:
    from minicluster.plan import Plan

WARM_UP_S = 10.0
"""Warm-up at the planned rate, then as long at the rate of the run; neither is judged."""

GOODPUT = 0.9
FIRST_ID = 300


def main() -> int:
    """Deploy, load, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("plan", type=Path, nargs="?", default=Path("out/demo/plan.json"))
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    if not given.plan.exists():
        print(f"{given.plan} is missing: `make demo` writes it")
        return Exit.BAD_INPUT
    plan, root = read_plan(given.plan), Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        source = str(root / plan.model.source)
        model = replace(plan.model, source=source)
        plan = replace(plan, inputs=replace(plan.inputs, model=model))
        os.chdir(place)  # where `serving` keeps its state
        [port] = free_ports(1)
        site = Site(target=plan.inputs.gpu.kind, host="127.0.0.1", port=port)
        endpoint = bring_up(plan.deployment, site, report=lambda _text: None, plan=plan)
        try:
            samples = asyncio.run(run(plan, endpoint.base_url, given.factor, given.seconds))
        finally:
            take_down(endpoint.state)
            os.chdir(root)
    return judge(plan, samples, given.factor, given.seconds)


async def run(plan: Plan, url: str, factor: float, seconds: float) -> list[Sample]:
    """Warm up, overload; return what was due after the warm-up."""
    rates = [(1.0, WARM_UP_S, 1), (factor, WARM_UP_S + seconds, 2)]
    samples: list[Sample] = []
    for times, length_s, seed in rates:
        rate = plan.workload.requests_per_s * times
        load = replace(plan.workload, requests_per_s=rate)
        arrivals = poisson_arrivals(load, duration_s=length_s, seed=seed)
        rng = np.random.default_rng(seed)
        vocabulary = plan.model.vocab_size
        asked = [
            body(plan.model.id, rng.integers(FIRST_ID, vocabulary, size=size), output)
            for size, output in zip(arrivals.input_tokens, arrivals.output_tokens, strict=True)
        ]
        samples = await open_loop(url, asked, arrivals.due_s.tolist())
    return [sample for sample in samples if sample.due_s > WARM_UP_S]


def judge(plan: Plan, samples: list[Sample], factor: float, seconds: float) -> int:
    """Print every figure beside its limit."""
    slo, rate = plan.slo, plan.workload.requests_per_s
    statuses = Counter(sample.status for sample in samples)
    answered = [sample for sample in samples if sample.status == 200]  # noqa: PLR2004
    pace = [sample.tpot_s for sample in answered if sample.tpot_s == sample.tpot_s]
    good = sum(
        sample.ttft_s <= slo.ttft_s and (slo.tpot_s is None or not sample.tpot_s > slo.tpot_s)
        for sample in answered
    )
    limits = [("TTFT", [s.ttft_s for s in answered], slo.ttft_s), ("TPOT", pace, slo.tpot_s)]
    rows = [
        (f"{name} {percentile}", value_ms, limit_s * 1e3, value_ms <= limit_s * 1e3, "ms")
        for name, values_s, limit_s in limits
        if limit_s is not None
        for percentile in sorted({slo.percentile, "p99"})
        for value_ms in [percentile_ms(values_s, float(f"0.{percentile[1:]}"))]
    ]
    refused = [s.answered_s for s in samples if s.status == 429] or [0.0]  # noqa: PLR2004
    wrong = sum(number for status, number in statuses.items() if status not in {200, 429})
    rows += [
        ("goodput", good / seconds, GOODPUT * rate, good / seconds >= GOODPUT * rate, "/s"),
        ("other errors", wrong, 0, wrong == 0, ""),
    ]
    print(f"{factor:g} times {rate:.2f} requests/s for {seconds:g} s: {dict(statuses)}")
    print(f"refusals came within {percentile_ms(refused, 0.99):.1f} ms (p99)")
    for name, value, limit, kept, unit in rows:
        print(f"{name:14} {value:9.2f} {unit:3} limit {limit:9.2f}  {'kept' if kept else 'MISSED'}")
    return Exit.DONE if all(kept for *_, kept, _ in rows) else Exit.NEGATIVE


if __name__ == "__main__":
    raise SystemExit(main())
