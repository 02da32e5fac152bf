"""
`make demo`: measure this machine, plan for it, serve the plan, load it, judge; then learn from it.

Each step is a command that anyone can type; this script only types them, in order, and sees to it
that nothing is left running. What the commands print is in out/demo/log.txt (`-v`: here). It leaves
calibration.json, plan.json, schedule.jsonl, samples.jsonl, verdict.json and report.html in
out/demo; the constants refitted to that run in recalibrated.json, and the run that they were not
fitted to in out/demo/again.

Exit codes: 0 SLO met, or not missed in a run too short to prove it; 3 missed, or no plan holds it
on this machine; 4 the machine was too busy to say anything; that of a command that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from minicluster.command import run_child, terminable
from minicluster.contention import CpuTimes, cpu_times, others_fraction
from minicluster.errors import Exit
from minicluster.pages.page import Page
from minicluster.pages.write import write_page
from serving.cluster.processes import cluster_processes

BIN = Path(sys.executable).parent
OUT = Path("out/demo")
AGAIN = OUT / "again"
LOG = OUT / "log.txt"
MODEL = Path(".minicluster/models/demo")
RUNNING = Path(".minicluster/serving/state.json")
SCENARIO = "configs/scenarios/laptop.toml"
LAYOUT = ("--prefill", "1xTP1", "--decode", "1xTP1")
KEEP = os.environ.get("KEEP") == "1"
MARK = "MINICLUSTER_DEMO"
"""Environment variable that identifies the processes of this demo."""

UTILISATION = 0.35
"""Predicted utilisation of the busier pool: requests queue, and the tail is not all noise."""

FIRST_RATE, LEAST_RATE, RATE_STEPS = 2.0, 0.05, 3
"""Requests/s at which the search for the demo's rate begins, the fewest, and its predictions."""

PERCENTILE = "p90"
"""Percentile of the SLO: a minute of load proves a p90, not a p99."""

REQUESTS, LOAD_S = (600, 640), 60.0
AGAIN_REQUESTS, AGAIN_S = (240, 340), 35.0
"""
Fewest and most requests measured in each load, and the seconds that decide between them; up to a
quarter may go to a warm-up that lasts longer than planned.
"""

MORE, MOST_LONGER = 1.5, 2
"""
Requests of a second try in terms of those that would decide an open verdict, and at most in terms
of the first try.
"""

LOOSER_SLO = (1, 2, 4)
"""Factors on the SLO's limits: the first one is taken that a plan holds with room to spare."""

ROOM = 0.7
"""
Largest predicted latency, as a share of its limit. Closer to it, admission refuses bursts: its
forecast has a margin for what this machine's pace alone does to a request.
"""

AGAIN_RATE = 1.15
"""Factor of the second rate: a load that the constants were not fitted to."""

TOO_BUSY = 0.2
"""Fraction of the cores used by other processes above which they explain a failed command."""

QUIET_S = 20.0
"""Interval of the progress lines where stderr is no terminal."""

ENDED = (Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE)
"""Exit codes of a load test that has a verdict."""


class StepFailed(Exception):
    """A command ended with an unexpected exit code."""

    def __init__(self, line: str, code: int, said: list[str]) -> None:
        """Keep the command line, its exit code, and the last lines that it printed."""
        super().__init__(f"`{line}` ended with exit code {code}")
        self.code = code
        self.said = said


@dataclass(slots=True)
class Screen:
    """
    The output for people: one line per step, and its progress.

    Attributes:
        verbose: commands print here instead of into the log.
        last: lines that the running command printed last.
    """

    verbose: bool
    last: list[str] = field(default_factory=list)
    _told_s: float = 0.0

    def say(self, text: str) -> None:
        """Print a line."""
        self._clear()
        sys.stderr.write(f"demo: {text}\n")
        sys.stderr.flush()
        self._told_s = time.monotonic()

    def follow(self, stream: IO[str], log: IO[str]) -> None:
        """Write the output of a command into the log, and show its last line."""
        for line in stream:
            log.write(line)
            log.flush()
            text = line.strip()
            self.last = [*self.last[-7:], text]
            if sys.stderr.isatty():
                width = shutil.get_terminal_size().columns - 8
                sys.stderr.write(f"\r\x1b[K      {text[:width]}")
                sys.stderr.flush()
            elif time.monotonic() > self._told_s + QUIET_S:
                self.say(f"  {text}")

    def _clear(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")


@dataclass(slots=True)
class Demo:
    """One run of the demo: its screen, and the cores that other processes used."""

    screen: Screen
    mark: str
    begun: CpuTimes

    def command(self, *parts: object, endings: tuple[int, ...] = (Exit.DONE,)) -> int:
        """
        Run one of our commands.

        Raises:
            StepFailed: the command ended with an exit code that is not in *endings*.
            KeyboardInterrupt: the command was interrupted.
        """
        line = [str(BIN / str(parts[0])), *map(str, parts[1:])]
        if self.screen.verbose:
            code = run_child(line)
        else:
            with LOG.open("a", encoding="utf-8") as log:
                log.write(f"$ {' '.join(map(str, parts))}\n")
                log.flush()
                reading, writing = os.pipe()
                with os.fdopen(reading, encoding="utf-8", errors="replace") as stream:
                    reader = threading.Thread(target=self.screen.follow, args=(stream, log))
                    reader.start()
                    try:
                        code = run_child(line, stdout=log, stderr=writing)
                    finally:
                        os.close(writing)
                        reader.join()
        if code in (Exit.INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        if code not in endings:
            raise StepFailed(" ".join(map(str, parts[:2])), code, self.screen.last)
        return code

    def clock(self) -> CpuTimes:
        """Return the processor times at this moment."""
        return cpu_times({*cluster_processes(self.mark, MARK), os.getpid()})

    def disturbed_fraction(self) -> float:
        """Return the fraction of the cores that other processes used since the start."""
        return others_fraction(self.begun, self.clock())


def main() -> int:
    """Run the steps, stop what they started, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that commands print")
    screen = Screen(verbose=parser.parse_args().verbose)
    if RUNNING.exists():
        screen.say(f"something is deployed from this directory; stop it: {BIN}/serving down")
        return Exit.BAD_INPUT
    shutil.rmtree(OUT, ignore_errors=True)
    AGAIN.mkdir(parents=True)
    os.environ[MARK] = mark = secrets.token_hex(8)
    demo = Demo(screen=screen, mark=mark, begun=cpu_times({os.getpid()}))
    keep, code = False, int(Exit.BUG)
    try:
        with terminable():
            code = steps(demo)
        keep = KEEP
    except StepFailed as failed:
        code = give_up(demo, failed)
    except KeyboardInterrupt:
        screen.say("interrupted")
        code = Exit.INTERRUPTED
    finally:
        ended = {"exit_code": int(code), "others_fraction": demo.disturbed_fraction()}
        (OUT / "demo.json").write_text(json.dumps(ended) + "\n", encoding="utf-8")
        # An interrupt from here on must not stop `serving down`.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not keep and RUNNING.exists():
            with suppress(KeyboardInterrupt):
                demo.command("serving", "down", endings=tuple(range(256)))
    return code


def steps(demo: Demo) -> int:
    """Measure, plan, serve, load, and once more; return the first load test's exit code."""
    say = demo.screen.say
    calibration, plan, fitted = (
        OUT / "calibration.json",
        OUT / "plan.json",
        OUT / "recalibrated.json",
    )
    say("1/6 make a small random Llama, in the dtype that this CPU computes natively")
    demo.command("serving", "demo-model", MODEL)
    say("2/6 deploy a prefill and a decode engine, time their steps and a short load")
    engine = ("--engine", "--keep", "-o", calibration)
    demo.command("sizing", "calibrate", SCENARIO, *engine)
    rate = demo_rate(calibration)
    say(f"3/6 plan for {rate} requests/s, and serve the plan on the engines that are up")
    looser = make_plan(demo, calibration, rate, plan)
    demo.command("serving", "up", plan, "--port", free_port())
    host = json.loads(RUNNING.read_text(encoding="utf-8"))["base_url"]
    requests = num_requests(rate, LOAD_S, REQUESTS)
    say(f"4/6 load it: {requests} requests at {rate} requests/s")
    first = load(demo, plan, host, requests, OUT, seed=0)
    needed = max((each["num_needed"] or 0 for each in first["slo"]), default=0)
    if first["verdict"] == "inconclusive" and needed:
        requests = min(MOST_LONGER * requests, round(MORE * needed))
        say(f"4/6 bursts leave the verdict open: load it again, {requests} requests")
        first = load(demo, plan, host, requests, OUT, seed=2)
    if first["verdict"] == "invalid":
        say("5/6 and 6/6 are left out: an invalid run gives nothing to fit")
        name_disturbance(demo, first)
        summary(demo, first, None)
        return int(first["exit_code"])
    say("5/6 refit the constants to what was measured, and plan another load with them")
    demo.command("sizing", "calibrate", "--from", OUT / "samples.jsonl", "-o", fitted)
    rate = round(AGAIN_RATE * rate, 2)
    make_plan(demo, fitted, rate, AGAIN / "plan.json", looser=looser)
    requests = num_requests(rate, AGAIN_S, AGAIN_REQUESTS)
    say(f"6/6 load again: {requests} requests at {rate} requests/s")
    second = load(demo, AGAIN / "plan.json", host, requests, AGAIN, seed=1)
    summary(demo, first, second)
    if KEEP:
        say(f"still up: {host}/v1/completions; stop it with {BIN}/serving down")
    if first["verdict"] == "inconclusive":
        return Exit.DONE
    return int(first["exit_code"])


def load(
    demo: Demo, plan: Path, host: str, requests: int, folder: Path, *, seed: int
) -> dict[str, Any]:
    """Load the endpoint as *plan* says; return the verdict."""
    extent = ("--requests", requests, "--seed", seed, "-o", folder)
    demo.command("loadtest", "run", plan, "--host", host, *extent, endings=ENDED)
    verdict: dict[str, Any] = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    return verdict


def name_disturbance(demo: Demo, verdict: dict[str, Any]) -> None:
    """Put the load by other processes before the other reasons of an invalid run."""
    others = demo.disturbed_fraction()
    if others > TOO_BUSY:
        verdict["reasons"] = [busy_text(others), *verdict["reasons"]]
        text = json.dumps(verdict, indent=2) + "\n"
        (OUT / "verdict.json").write_text(text, encoding="utf-8")


def busy_text(others: float) -> str:
    """Return the text about other processes."""
    return f"other processes took {others:.0%} of the cores"


def make_plan(demo: Demo, calibration: Path, rate: float, path: Path, *, looser: int = 1) -> int:
    """
    Plan the demo's scenario at *rate*, with its SLO's limits times *looser*.

    A CPU too slow for them gets a plan for limits that it holds with room, and says so.

    Returns:
        The factor on the limits that the plan holds.
    """
    slo = tomllib.loads(Path(SCENARIO).read_text(encoding="utf-8"))["slo"]
    for factor in LOOSER_SLO[LOOSER_SLO.index(looser) :]:
        limits = {"ttft_s": factor * slo["ttft_s"], "tpot_s": factor * slo["tpot_s"]}
        keys = {"workload.requests_per_s": rate, "slo.percentile": PERCENTILE}
        keys |= {f"slo.{name}": limit_s for name, limit_s in limits.items()}
        settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        final = factor == LOOSER_SLO[-1]
        endings = (Exit.DONE,) if final else (Exit.DONE, Exit.NEGATIVE)
        command = ("sizing", "plan", SCENARIO, "--calibration", calibration, *settings, "-o", path)
        if demo.command(*command, endings=endings) == Exit.DONE and (final or has_room(path)):
            break
        demo.screen.say(
            f"  this CPU does not hold {PERCENTILE} of TTFT < {limits['ttft_s']:g} s and"
            f" TPOT < {limits['tpot_s']:g} s with room to spare; planning for twice these limits"
        )
    return factor


def has_room(plan: Path) -> bool:
    """Return whether the predicted latencies of a plan stay well below its limits."""
    written = json.loads(plan.read_text(encoding="utf-8"))
    predicted, slo = written["prediction"], written["slo"]
    return all(
        predicted[name][f"{PERCENTILE}_s"] <= ROOM * slo[f"{name}_s"] for name in ("ttft", "tpot")
    )


def num_requests(rate: float, seconds: float, bounds: tuple[int, int]) -> int:
    """Return the requests of so many seconds at *rate*, within bounds."""
    fewest, most = bounds
    return max(fewest, min(most, round(rate * seconds)))


def demo_rate(calibration: Path) -> float:
    """Return the rate that loads the busier pool to UTILISATION, on a CPU however slow."""
    rate = FIRST_RATE
    for _ in range(RATE_STEPS):
        used = utilisation(calibration, rate)
        # Almost linear in the rate: a busy pool slows the other one down a little more.
        rate = max(LEAST_RATE, round(rate * (UTILISATION / used if used else 1 / 4), 2))
    return rate


def utilisation(calibration: Path, rate: float) -> float | None:
    """Return the predicted utilisation of the busier pool; `None` where the rate saturates it."""
    at_rate = ("--set", f"workload.requests_per_s={rate}", "--json")
    predict = ["predict", SCENARIO, *LAYOUT, "--calibration", str(calibration), *at_rate]
    done = subprocess.run([BIN / "sizing", *predict], check=False, capture_output=True)
    if done.returncode == Exit.NEGATIVE:
        return None
    if done.returncode:
        raise StepFailed("sizing predict", done.returncode, [done.stderr.decode().strip()])
    found = json.loads(done.stdout)["prediction"]["utilisation_fraction"]
    return float(max(found.values()))


def free_port(preferred: int = 8000) -> int:
    """Return *preferred*, or 0 for any free port if that one is in use."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return 0
    return preferred


def summary(demo: Demo, first: dict[str, Any], second: dict[str, Any] | None) -> None:
    """Print the plan, predicted beside measured latencies, the verdict, and the next commands."""
    plan = json.loads((OUT / "plan.json").read_text(encoding="utf-8"))
    pools = ", ".join(f"{p['replicas']} {p['role']} replica on 1 core" for p in plan["pools"])
    dtype, load_s = plan["pools"][0]["dtype"], plan["workload"]["requests_per_s"]
    lines = [f"plan: {pools}, {dtype}, for {load_s} requests/s", ""]
    lines += [f"{'':24}{'predicted':>12}{'measured':>12}{'error':>8}"]
    runs = {"first load": first, "second load, refitted": second}
    for name, verdict in runs.items():
        if verdict is not None and verdict["comparison"] is not None:
            lines += [f"{name} ({sum(verdict['outcomes'].values())} requests judged)"]
            lines += [*compared(verdict)]
    others = demo.disturbed_fraction()
    lines += ["", *(f"SLO: {line}" for line in slo_lines(first))]
    if others > TOO_BUSY:
        lines += [f"{busy_text(others)}: expect larger errors"]
    spent = time.monotonic() - demo.begun.at_s
    lines += [
        f"verdict: {first['verdict'].upper()}{'; ' if first['reasons'] else ''}"
        + "; ".join(first["reasons"])[:200],
        f"page:    {OUT / 'report.html'}   (all that was printed: {LOG}; {spent:.0f} s in all)",
        "next:    KEEP=1 make demo             leaves the endpoint up, to try with curl",
        "         .venv/bin/sizing explain out/demo/plan.json     each term of the prediction",
        "         .venv/bin/sizing plan llama-3.1-70b-h100        a plan for GPUs",
    ]
    demo.screen.say("done\n")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def compared(verdict: dict[str, Any]) -> list[str]:
    """Return a line for each of the main latencies."""
    rows = {(row["metric"], row["statistic"]): row for row in verdict["comparison"]["rows"]}
    lines = []
    for metric, statistic in (("ttft", "mean"), ("ttft", "p90"), ("tpot", "mean"), ("tpot", "p90")):
        row = rows.get((metric, statistic))
        if row is not None:
            predicted, measured = 1e3 * row["predicted_s"], 1e3 * row["measured_s"]
            error = f"{row['error_fraction']:+.0%}"
            name = f"  {metric.upper()} {statistic}"
            lines.append(f"{name:24}{predicted:9.1f} ms{measured:9.1f} ms{error:>8}")
    return lines


def slo_lines(verdict: dict[str, Any]) -> list[str]:
    """Return a line for each limit of the SLO."""
    return [
        f"{each['metric'].upper()} {each['percentile']} < {1e3 * each['limit_s']:g} ms: met by "
        f"{each['attained_fraction']:.1%} of {each['num_requests']} requests"
        for each in verdict["slo"]
    ]


def give_up(demo: Demo, failed: StepFailed) -> int:
    """Report the failed command; if other processes explain it, the run is invalid: exit 4."""
    others = demo.disturbed_fraction()
    busy = others > TOO_BUSY
    if failed.code == Exit.BAD_INPUT or (failed.code == Exit.BUG and not busy):
        verdict, code = "failed", failed.code
    elif busy:
        verdict, code = "invalid", Exit.INCONCLUSIVE
    else:
        verdict, code = ("infeasible" if failed.code == Exit.NEGATIVE else "failed"), failed.code
    reasons = [busy_text(others)] if busy else []
    reasons += [str(failed), *failed.said[-3:]]
    record = {"verdict": verdict, "exit_code": int(code), "reasons": reasons}
    (OUT / "verdict.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    page = Page(title="demo", headline=verdict.upper(), status=verdict, lines=tuple(reasons))
    write_page(OUT / "report.html", page)
    for reason in reasons:
        demo.screen.say(reason)
    demo.screen.say(f"{verdict.upper()}; all that was printed: {LOG}; page: {OUT / 'report.html'}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
