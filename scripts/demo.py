"""
`make demo`: measure this machine, plan for it, serve the plan, load it, judge; then learn from it.

Each step is a command that anyone can type; this script only types them, in order, and sees to
it that nothing is left running. It leaves calibration.json, plan.json, schedule.jsonl,
samples.jsonl, verdict.json and report.html in out/demo; the constants refitted to that run in
recalibrated.json, and the run that they were not fitted to in out/demo/again. Its exit code is
that of the first step that fails, else the first verdict's: 0 SLO met, or not missed in a run too
short to prove it, 3 missed, 4 invalid.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from sizing.child import run_child, terminable
from sizing.errors import Exit

BIN = Path(sys.executable).parent
OUT = Path("out/demo")
MODEL = Path(".minicluster/models/demo")
CALIBRATION = Path(".minicluster/calibrations/demo.json")
KEPT_S = 1200
"""Age up to which a calibration is used again: shared machines change their pace, by a third."""

RUNNING = Path(".minicluster/serving/state.json")
SCENARIO = "configs/scenarios/laptop.toml"
LAYOUT = ("--prefill", "1xTP1", "--decode", "1xTP1")
KEEP = os.environ.get("KEEP") == "1"

UTILISATION = 0.45
"""Predicted, of the busier pool: enough to queue, not so much that the tail is all noise."""

PERCENTILE = "p90"
"""Of the SLO: two minutes of load at seven requests/s prove a p90, not a p99."""

LOAD_S = 105
"""Seconds measured: at seven requests/s 700, and what queues together is worth a fifth of that."""

AGAIN = OUT / "again"
AGAIN_S = 45
AGAIN_RATE = 1.15
"""Times the first rate: the second run is of a load that the constants were not fitted to."""


def main() -> int:
    """Run the steps, stop what they started, return the exit code."""
    started = time.monotonic()
    if RUNNING.exists():
        say(f"something is deployed from this directory already; stop it with {BIN}/serving down")
        return Exit.BAD_INPUT
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    keep = False
    try:
        with terminable():
            code = steps(started)
        keep = KEEP
    except subprocess.CalledProcessError as error:
        say(f"`{Path(error.cmd[0]).name} {error.cmd[1]}` ended with exit code {error.returncode}")
        code = error.returncode
    except KeyboardInterrupt:
        say("interrupted")
        code = 130
    finally:
        # However often Ctrl-C is pressed from here on, `serving down` runs to its end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not keep:
            subprocess.run([BIN / "serving", "down"], check=False, stderr=subprocess.DEVNULL)
    return code


def steps(started: float) -> int:
    """Measure, plan, serve, load, and once more; return the first load test's exit code."""
    say("1/7 the demo model: a random Llama, made here")
    command("serving", "demo-model", MODEL)
    say(f"2/7 time this machine's engine (kept for runs of the next {KEPT_S // 60} minutes)")
    CALIBRATION.parent.mkdir(parents=True, exist_ok=True)
    fresh = CALIBRATION.exists() and time.time() - CALIBRATION.stat().st_mtime < KEPT_S
    again = () if fresh else ("--again",)
    command("sizing", "calibrate", SCENARIO, "--engine", *again, "-o", CALIBRATION)
    calibration = OUT / "calibration.json"
    shutil.copy(CALIBRATION, calibration)
    say("3/7 plan for it")
    rate = demo_rate(calibration)
    plan = planned(calibration, rate, OUT / "plan.json")
    say("4/7 serve the plan")
    port = free_port()
    command("serving", "up", plan, "--port", port)
    say(f"5/7 load it: {rate} requests/s for {LOAD_S} s")
    host = f"http://127.0.0.1:{port}"
    load = ("--host", host, "--duration", LOAD_S, "-o", OUT)
    code = command("loadtest", "run", plan, *load, may_end_with=(0, 3, 4))
    if code == Exit.INCONCLUSIVE and verdict(OUT) == "inconclusive":
        say("nothing missed the SLO, but a run this short does not always prove that: see above")
        code = Exit.DONE
    if verdict(OUT) == "invalid":
        say("6/7, 7/7 left out: there is nothing to learn from a run that was invalid")
    else:
        learn(host, round(AGAIN_RATE * rate, 2))
    say(f"{time.monotonic() - started:.0f} s in all; look at {OUT / 'report.html'}")
    if KEEP:
        say(f"still up: {host}/v1/completions; stop it with {BIN}/serving down")
    return code


def learn(host: str, rate: float) -> None:
    """Refit the constants to the run, plan another load with them, load it, compare."""
    say("6/7 refit the constants to what was measured, and plan another load with them")
    fitted, first = OUT / "recalibrated.json", OUT / "samples.jsonl"
    command("sizing", "calibrate", "--from", first, "-o", fitted)
    AGAIN.mkdir()
    plan = planned(fitted, rate, AGAIN / "plan.json")
    say(f"7/7 load again, {rate} requests/s for {AGAIN_S} s; error before and after refitting")
    load = ("--host", host, "--duration", AGAIN_S, "--seed", 1, "-o", AGAIN)
    command("loadtest", "run", plan, *load, may_end_with=(0, 3, 4))
    second = ("--hold-out", AGAIN / "samples.jsonl")
    # With the first plan, whose constants are those before: the refit gives the same ones again.
    command("sizing", "calibrate", "--from", first, *second, "-o", fitted)


def planned(calibration: Path, rate: float, path: Path) -> Path:
    """Plan the demo's scenario at *rate*."""
    load = ("--set", f"workload.requests_per_s={rate}", "--set", f"slo.percentile={PERCENTILE}")
    command("sizing", "plan", SCENARIO, "--calibration", calibration, *load, "-o", path)
    return path


def verdict(folder: Path) -> str:
    """Return what a load test said."""
    return str(json.loads((folder / "verdict.json").read_text(encoding="utf-8"))["verdict"])


def demo_rate(calibration: Path) -> float:
    """Return the rate that loads the busier pool to UTILISATION."""
    rate = 1.0
    for _ in range(4):
        at_rate = ("--set", f"workload.requests_per_s={rate}", "--json")
        predict = ["predict", SCENARIO, *LAYOUT, "--calibration", str(calibration), *at_rate]
        done = subprocess.run([BIN / "sizing", *predict], check=True, stdout=subprocess.PIPE)
        found = json.loads(done.stdout)["prediction"]["utilisation_fraction"]
        # Almost linear in the rate: a busy pool slows the other one down a little more.
        rate = round(rate * UTILISATION / max(found.values()), 2)
    return rate


def command(*parts: object, may_end_with: tuple[int, ...] = (0,)) -> int:
    """Run one of our commands; stop here if it ends otherwise than it may."""
    line = [str(BIN / str(parts[0])), *map(str, parts[1:])]
    code = run_child(line)
    if code in (Exit.INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if code not in may_end_with:
        raise subprocess.CalledProcessError(code, line)
    return code


def free_port(preferred: int = 8000) -> int:
    """Return *preferred*, or any free port if something listens there."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit("demo: no free port on 127.0.0.1")


def say(what: str) -> None:
    """Talk on stderr."""
    sys.stderr.write(f"demo: {what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
