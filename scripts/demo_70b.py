"""
`make demo-70b`: a plan for 52 GPUs, tried on this machine with simulated engines.

Each step is a command that anyone can type; this script types them, in order, and takes the
deployment down. It leaves plan.json, samples.jsonl, verdict.json and report.html in out/demo-70b.
Exit codes are the load test's, or those of a command that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from minicluster.command import run_child, terminable, uninterrupted
from minicluster.errors import Exit
from serving.cluster.ports import free_ports

OUT = Path("out/demo-70b")
BIN = Path(sys.executable).parent
SCENARIO = "llama-3.1-70b-h100"

SLOWDOWN = 12
"""The plan streams 10,000 tokens per second; two cores pass on about a tenth of that."""

REQUESTS = 400
WARMUP_S = 15
"""Seconds of the plan after which as many requests decode as later on: an answer takes 10."""

TRUST = (Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE)
"""Exit codes of a load test that has a verdict."""


def main() -> int:
    """Run the steps, take down what they deployed; return the load test's exit code."""
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        return steps()
    except KeyboardInterrupt:
        sys.stderr.write("demo-70b: interrupted\n")
        return Exit.INTERRUPTED
    finally:
        print("\n$ serving down", flush=True)
        with uninterrupted():  # in a group of its own, which the terminal does not signal
            subprocess.run([BIN / "serving", "down"], cwd=OUT, check=False, process_group=0)


def steps() -> int:
    """Plan, deploy, load; return the exit code of the last command."""
    started_s = time.monotonic()
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    engine = ("--engine", "simulated", "--slowdown", str(SLOWDOWN), "--port", str(port))
    code = typed("sizing", "plan", SCENARIO, "-o", "plan.json")
    code = code or typed("serving", "up", "plan.json", *engine)
    if code:
        return code
    print(f"\nits live page: {address}/ ; {REQUESTS} requests, slowdown {SLOWDOWN}", flush=True)
    length = ("--requests", str(REQUESTS), "--warmup", str(WARMUP_S))
    code = typed("loadtest", "run", "plan.json", "--host", address, *length, "-o", ".")
    if code in TRUST:
        print(f"\n{(time.monotonic() - started_s) / 60:.1f} minutes; see {OUT / 'report.html'}")
    return code


def typed(*words: str) -> int:
    """
    Run a command in the folder of the demo, as if it had been typed there.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    print("\n$ " + " ".join(words), flush=True)
    code = run_child([str(BIN / words[0]), *words[1:]], cwd=OUT, env=dict(os.environ))
    if code in (Exit.INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    return code


if __name__ == "__main__":
    with terminable():
        sys.exit(main())
