"""
`make demo-70b`: a plan for 56 GPUs, tried on this machine with simulated engines.

Each step is a command that anyone can type; this script types them, in order, and takes the
deployment down. It leaves plan.json, samples.jsonl, verdict.json and report.html in out/demo-70b.
Options name another scenario, its folder, slowdown and number of requests.
Exit codes are the load test's, or those of a command that failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from minicluster.command import run_child, terminable, uninterrupted
from minicluster.errors import Exit
from serving.cluster.ports import free_ports

BIN = Path(sys.executable).parent
SLOWDOWN = 3.0
"""
The plan streams 9,000 tokens per second; two cores pass on 3,000 of them, for which endpoint,
replicas and load client take about one core. The time of the demo goes into this factor: 37 s of
the plan become two minutes.
"""

REQUESTS = 300
WARMUP_S = 12
"""Seconds of the plan after which as many requests decode as later on: an answer takes 10."""

TRUST = (Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE)
"""Exit codes of a load test that has a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Scenario, folder of the results, slowdown of the engines, and requests of the load test."""

    scenario: str
    out: Path
    slowdown: float
    requests: int


def options() -> Options:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Try a plan for GPUs on this machine.")
    parser.add_argument("--scenario", default="llama-3.1-70b-h100")
    parser.add_argument("--out", type=Path, default=Path("out/demo-70b"))
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    return Options(**vars(parser.parse_args()))


def main(asked: Options) -> int:
    """Run the steps, take down what they deployed; return the load test's exit code."""
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        return steps(asked)
    except KeyboardInterrupt:
        sys.stderr.write("demo-70b: interrupted\n")
        return Exit.INTERRUPTED
    finally:
        print("\n$ serving down", flush=True)
        with uninterrupted():  # in a group of its own, which the terminal does not signal
            subprocess.run([BIN / "serving", "down"], cwd=asked.out, check=False, process_group=0)


def steps(asked: Options) -> int:
    """Plan, deploy, load; return the exit code of the last command."""
    started_s = time.monotonic()
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    engine = ("--engine", "simulated", "--slowdown", f"{asked.slowdown:g}", "--port", str(port))
    code = typed(asked.out, "sizing", "plan", asked.scenario, "-o", "plan.json")
    code = code or typed(asked.out, "serving", "up", "plan.json", *engine)
    if code:
        return code
    load = f"{asked.requests} requests, slowdown {asked.slowdown:g}"
    print(f"\nits live page: {address}/ ; {load}", flush=True)
    length = ("--requests", str(asked.requests), "--warmup", str(WARMUP_S))
    code = typed(asked.out, "loadtest", "run", "plan.json", "--host", address, *length, "-o", ".")
    if code in TRUST:
        minutes = (time.monotonic() - started_s) / 60
        print(f"\n{minutes:.1f} minutes; see {asked.out / 'report.html'}")
    return code


def typed(out: Path, *words: str) -> int:
    """
    Run a command in the folder *out*, as if it had been typed there.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    print("\n$ " + " ".join(words), flush=True)
    code = run_child([str(BIN / words[0]), *words[1:]], cwd=out, env=dict(os.environ))
    if code in (Exit.INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    return code


if __name__ == "__main__":
    with terminable():
        sys.exit(main(options()))
