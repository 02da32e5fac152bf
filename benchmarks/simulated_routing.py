"""
Routing policies on simulated engines against the event simulation of the same requests.

    python benchmarks/simulated_routing.py            # about 20 minutes on 2 quiet cores
    python benchmarks/simulated_routing.py --turns 4  # conversations; 8 minutes

Deploys the 70B plan's pools once for each policy, as `serving up --engine simulated` does, with
admission off, and sends prompts that keep the prefill pool 85 % busy. Answers are short, so that
the machine passes their tokens on in time. Prints mean and p99 TTFT, simulated and measured.
With --turns each prompt is the conversation so far and 2,000 new tokens, at 6 requests/s, and the
policies are those that a plan has by default, and by prefix.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from minicluster.plan import Plan, read_plan, to_json
from minicluster.routing import LEAST_TOKENS, POLICIES, PREFIX_AWARE
from minicluster.specs.workload import Lengths
from serving.cluster.ports import free_ports

BIN = Path(sys.executable).parent
BUSY_FRACTION = 0.85
OUTPUT_TOKENS = 20
SLOWDOWN = "5"
REQUESTS, WARMUP_S = 500, "5"
"""Requests for each policy, half as many of conversations, and seconds before they count."""

TURN_TOKENS, TURNS_PER_S, THINK_S = 2000, 6.0, "5"
"""New tokens of a turn, requests per second, and seconds from an answer to the next turn."""


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--turns", type=int, default=1, help="requests of a conversation")
    turns = parser.parse_args().turns
    policies = tuple(POLICIES) if turns == 1 else (LEAST_TOKENS, PREFIX_AWARE)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        longest = turns * (TURN_TOKENS + OUTPUT_TOKENS)
        room = ("--set", f"model.max_context_tokens={max(4512, longest)}")
        typed(place, "sizing", "plan", "llama-3.1-70b-h100", *room, "-o", "plan.json")
        plan = read_plan(place / "plan.json")
        print("policy        TTFT mean: simulated measured  p99: simulated measured, ms")
        for policy in policies:
            under = routed(plan, policy, turns)
            (place / "plan.json").write_text(to_json(under), encoding="utf-8")
            statistics = loaded(place, turns)
            print(f"{policy:13}", *(f"{1e3 * seconds:9.0f}" for seconds in statistics), flush=True)


def routed(plan: Plan, policy: str, turns: int) -> Plan:
    """Return the plan with another policy, under the load of this benchmark."""
    load, busy = plan.workload, plan.prediction.utilisation_fraction["prefill"]
    load = replace(
        load,
        requests_per_s=load.requests_per_s * BUSY_FRACTION / busy,
        output_tokens=Lengths.fixed(OUTPUT_TOKENS),
    )
    if turns > 1:
        load = replace(load, requests_per_s=TURNS_PER_S, input_tokens=Lengths.fixed(TURN_TOKENS))
    return replace(plan, routing=replace(plan.routing, policy=policy)).under(workload=load)


def loaded(place: Path, turns: int) -> tuple[float, float, float, float]:
    """Deploy the plan in *place*, load it, take it down; return mean and p99, each twice."""
    [port] = free_ports(1)
    # Nothing is tried a second time: a retry is load that the simulation does not have.
    patience = ("--prefill-deadline", "300", "--kv-deadline", "300")
    engine = ("--engine", "simulated", "--slowdown", SLOWDOWN, "--port", str(port), *patience)
    try:
        typed(place, "serving", "up", "plan.json", *engine)
        length = ["--requests", str(REQUESTS // min(turns, 2)), "--warmup", WARMUP_S]
        if turns > 1:
            length += ["--turns", str(turns), "--think", THINK_S]
        host = f"http://127.0.0.1:{port}"
        typed(place, "loadtest", "run", "plan.json", "--host", host, *length, "-o", "run")
    finally:
        typed(place, "serving", "down")
    verdict = json.loads((place / "run/verdict.json").read_text(encoding="utf-8"))
    predicted = {
        row["statistic"]: row for row in verdict["comparison"]["rows"] if row["metric"] == "ttft"
    }
    mean, p99 = predicted["mean"], predicted["p99"]
    return mean["predicted_s"], mean["measured_s"], p99["predicted_s"], p99["measured_s"]


def typed(place: Path, *words: str) -> None:
    """Run a command in *place*; its output is shown where it fails."""
    done = subprocess.run(  # noqa: S603  (our own commands)
        [str(BIN / words[0]), *words[1:]],
        cwd=place, env=os.environ | {"MINICLUSTER_ADMISSION": "off"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode not in {0, 3, 4}:
        sys.exit(
            f"{' '.join(words)}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


if __name__ == "__main__":
    main()
