"""
`make demo`: measure this machine, plan for it, serve the plan, load it, judge; then learn from it.

Each step is a command that anyone can type; this script only types them, in order, and sees to it
that nothing is left running. What the commands print is in out/demo/log.txt (`-v`: here). It leaves
calibration.json, plan.json, schedule.jsonl, samples.jsonl, verdict.json and report.html in
out/demo; the constants refitted to that run in recalibrated.json, and the run that they were not
fitted to in out/demo/again. `AGAIN=0` stops after the first load.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil
from demo_lines import load_lines, plan_lines, slo_lines

from minicluster.command import run_child, terminable
from minicluster.contention import ContentionMeter, CpuTimes, cpu_times
from minicluster.errors import Exit, InputError
from minicluster.files import write_atomically
from minicluster.pages.page import Page
from minicluster.pages.write import write_page
from serving.cluster.processes import cluster_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

BIN = Path(sys.executable).parent
OUT = Path("out/demo")
AGAIN = OUT / "again"
LOG = OUT / "log.txt"
MODEL = Path(".minicluster/models/demo")
RUNNING = Path(".minicluster/serving/state.json")
SCENARIO = "configs/scenarios/laptop.toml"
LAYOUT = ("--prefill", "1xTP1", "--decode", "1xTP1")
KEEP = os.environ.get("KEEP") == "1"
SECOND_LOAD = os.environ.get("AGAIN") != "0"
MARK = "MINICLUSTER_DEMO"
"""Environment variable that identifies the processes of this demo."""

MOST_USED = 0.40
"""Largest predicted utilisation of the busier pool; a slower CPU gets a lower rate."""

LEAST_RATE, RATE_STEPS = 0.05, 8
"""Fewest requests/s, and the most predictions that the search for a lower rate takes."""

PERCENTILE = "p50"
"""
Percentile of the SLO. A minute of load held 19 to 115 independent values, because the pace of a
machine drifts, and 35 of them prove a p90: four of eight demos would have ended undecided
(requests over design effects in tests/published/demo_repeats.toml).
"""

REQUESTS, LOAD_S = (340, 480), 60.0
"""
Fewest and most requests of the first load, and the seconds that decide between them.

Nearly all of them meet limits that the plan holds with room (`ROOM`). Four independent requests
without a miss prove a p50, so these decide it though ninety of them weigh as one.
"""

AGAIN_REQUESTS, AGAIN_S = (140, 300), 28.0
"""Likewise of the second load, which judges the prediction and not the SLO."""

LOOSER_SLO = (1, 2, 4)
"""Factors on the SLO's limits: the first one is taken that a plan holds with room to spare."""

ROOM = 0.7
"""
Largest predicted p90, as a share of its limit. Closer to it, admission refuses bursts: its
forecast has a margin for what this machine's pace alone does to a request.
"""

AGAIN_RATE = 0.85
"""Factor of the second rate: a load that the constants were not fitted to."""

LEAST_CORES, LEAST_BYTES, LEAST_DISK_BYTES = 2, 4_500_000_000, 50_000_000
"""Least cores, memory and disk; one run took 4.1 GB and 16 MB (2 cores, 2026-11-28)."""

TOO_BUSY = 0.2
"""Fraction of the cores used by other processes above which they explain a failed command."""

EXPECTED_S = {"model": 4.0, "calibrate": 110.0, "plan": 14.0, "refit": 9.0, "down": 5.0}
"""Seconds of each phase on 2 cores of 2026, for the time left; those of loads are known."""

AROUND_LOAD_S = 13.0
"""Seconds of warm-up, start and judgement around a load."""

CONTENTION_S = 5.0
"""Interval of the looks at what other processes take of the cores."""

QUIET_S = 20.0
"""Interval of the progress lines where stderr is no terminal."""

COMMANDS = ("sizing: ", "serving: ", "loadtest: ")
"""What an error of our commands begins with."""

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
            with suppress(OSError):  # of a full disk, which the command says itself
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


@contextmanager
def opened_log(line: str) -> Iterator[IO[str]]:
    """Open the log at a new line; on a full disk nothing is kept, and the command still runs."""
    try:
        log = LOG.open("a", encoding="utf-8")
        log.write(f"{line}\n")
        log.flush()
    except OSError:
        log = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (closed below)
    try:
        yield log
    finally:
        with suppress(OSError):
            log.close()


@dataclass(slots=True)
class Phase:
    """A part of the demo that has a line of progress, and how long it takes."""

    name: str
    expected_s: float
    begun_s: float | None = None


def first_phases() -> list[Phase]:
    """Return the phases, with the seconds that they are expected to take."""
    loads = {"load": AROUND_LOAD_S + LOAD_S, "again": AROUND_LOAD_S + AGAIN_S}
    names = ("model", "calibrate", "plan", "load", *(("refit", "again") if SECOND_LOAD else ()))
    expected = EXPECTED_S | loads
    return [Phase(name, expected[name]) for name in (*names, "down")]


@dataclass(slots=True)
class Demo:
    """One run of the demo: its screen, its phases, and the cores that other processes used."""

    screen: Screen
    mark: str
    phases: list[Phase]
    begun_s: float = field(default_factory=time.monotonic)
    contention: ContentionMeter = field(
        default_factory=lambda: ContentionMeter(cpu_times({os.getpid()}))
    )
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def phase(self, name: str, text: str) -> None:
        """Begin a phase: say which one, the seconds so far, and about how many are left."""
        now_s = time.monotonic()
        at = [phase.name for phase in self.phases].index(name)
        self.phases[at].begun_s = now_s
        spent_s = now_s - self.begun_s
        left_s = sum(phase.expected_s for phase in self.phases[at:])
        shown = [phase.name for phase in self.phases if phase.name != "down"]
        self.screen.say(f"{at + 1}/{len(shown)} {text} ({spent_s:.0f} s, {left_s:.0f} s left)")

    def expect(self, name: str, seconds: float) -> None:
        """Take note of how long a phase will be."""
        next(phase for phase in self.phases if phase.name == name).expected_s = seconds

    def seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase that has begun, up to the next one or to now."""
        begun = [(phase.name, phase.begun_s) for phase in self.phases if phase.begun_s is not None]
        ends = [*(begun_s for _, begun_s in begun[1:]), time.monotonic()]
        return {
            name: round(end_s - begun_s, 1)
            for (name, begun_s), end_s in zip(begun, ends, strict=True)
        }

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
            with opened_log(f"$ {' '.join(map(str, parts))}") as log:
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
        with self._looking:
            self.contention.add(self.clock())
            return self.contention.fraction

    def watch(self) -> None:
        """Look at the cores every few seconds, until the demo ends."""
        while True:
            time.sleep(CONTENTION_S)
            self.disturbed_fraction()


def main() -> int:
    """Run the steps, stop what they started, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("-v", "--verbose", action="store_true", help="show all that commands print")
    screen = Screen(verbose=parser.parse_args().verbose)
    refusal = refused()
    if refusal:
        screen.say(refusal)
        return Exit.BAD_INPUT
    os.environ[MARK] = mark = secrets.token_hex(8)
    demo = Demo(screen=screen, mark=mark, phases=first_phases())
    threading.Thread(target=demo.watch, daemon=True).start()
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
    except InputError as error:
        screen.say(str(error))
        code = Exit.BAD_INPUT
    except OSError as error:
        screen.say(f"{error.filename or OUT}: {error.strerror}; the demo needs room to write there")
        code = Exit.BAD_INPUT
    finally:
        # An interrupt from here on must not stop `serving down`.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        demo.phases[-1].begun_s = time.monotonic()
        others = demo.disturbed_fraction()
        if not keep and RUNNING.exists():
            with suppress(KeyboardInterrupt, OSError):
                demo.command("serving", "down", endings=tuple(range(256)))
        ended = {
            "exit_code": int(code),
            "others_fraction": others,
            "seconds": demo.seconds_by_phase(),
        }
        with suppress(InputError):  # a full disk, which the command that met it has named
            write_atomically(OUT / "demo.json", json.dumps(ended) + "\n")
    return code


def refused() -> str | None:
    """Return why the demo cannot run here, and what to do; make its folder if it can."""
    cores, memory_bytes = len(os.sched_getaffinity(0)), available_bytes()
    if RUNNING.exists():
        return f"something is deployed from this directory; stop it: {BIN}/serving down"
    if cores < LEAST_CORES:
        return f"{cores} core may be used; expected {LEAST_CORES} or more, one for each engine"
    if memory_bytes < LEAST_BYTES:
        return (
            f"{memory_bytes / 1e9:.1f} GB of memory are available; expected"
            f" {LEAST_BYTES / 1e9:g} GB or more for engines, Ray and load: end something, or try"
            " `sizing plan llama-3.1-8b-h100`, which needs no engine"
        )
    try:
        shutil.rmtree(OUT, ignore_errors=True)
        AGAIN.mkdir(parents=True)
        free_bytes = shutil.disk_usage(AGAIN).free
    except OSError as error:
        return f"{AGAIN}: {error.strerror}; expected a folder that can be written"
    if free_bytes < LEAST_DISK_BYTES:
        return (
            f"{OUT}: {free_bytes / 1e6:.1f} MB of the disk are free; expected"
            f" {LEAST_DISK_BYTES / 1e6:g} MB or more: delete something"
        )
    return None


def available_bytes() -> int:
    """Return the memory that this machine, or this control group, has left."""
    left: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # another version of control groups, or no limit
        folder = Path("/sys/fs/cgroup")
        limit, used = ((folder / f"memory.{name}").read_text() for name in ("max", "current"))
        left = min(left, int(limit) - int(used))
    return left


def steps(demo: Demo) -> int:
    """Measure, plan, serve, load, and once more; return the first load test's exit code."""
    calibration, plan, fitted = (
        OUT / "calibration.json",
        OUT / "plan.json",
        OUT / "recalibrated.json",
    )
    demo.phase("model", "make a small random Llama in this CPU's own dtype")
    demo.command("serving", "demo-model", MODEL)
    demo.phase("calibrate", "start two engines, time their steps and a short load")
    engine = ("--engine", "--keep", "-o", calibration)
    demo.command("sizing", "calibrate", SCENARIO, *engine)
    rate = demo_rate(calibration)
    demo.phase("plan", f"plan for {rate:g} requests/s, and serve the plan")
    looser = make_plan(demo, calibration, rate, plan)
    demo.command("serving", "up", plan, "--port", free_port())
    host = json.loads(RUNNING.read_text(encoding="utf-8"))["base_url"]
    requests = num_requests(rate, LOAD_S, REQUESTS)
    demo.expect("load", AROUND_LOAD_S + requests / rate)
    demo.phase("load", f"load it: {requests} requests at {rate:g} requests/s")
    first = load(demo, plan, host, requests, OUT, seed=0)
    show(plan_lines(plan) + load_lines("first load", first))
    if first["verdict"] == "invalid":
        name_disturbance(demo, first)
        demo.screen.say("no second load: an invalid run gives nothing to fit")
    elif SECOND_LOAD:
        rate = round(AGAIN_RATE * rate, 2)
        demo.phase("refit", f"refit to that load, and plan for {rate:g} requests/s")
        demo.command("sizing", "calibrate", "--from", OUT / "samples.jsonl", "-o", fitted)
        make_plan(demo, fitted, rate, AGAIN / "plan.json", looser=looser)
        requests = num_requests(rate, AGAIN_S, AGAIN_REQUESTS)
        demo.expect("again", AROUND_LOAD_S + requests / rate)
        demo.phase("again", f"load again: {requests} requests at {rate:g} requests/s")
        second = load(demo, AGAIN / "plan.json", host, requests, AGAIN, seed=1)
        show(load_lines("second load, refitted", second))
    show(verdict_lines(demo, first))
    if KEEP:
        demo.screen.say(f"still up: {host}/v1/completions; stop it with {BIN}/serving down")
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
        write_atomically(OUT / "verdict.json", text)


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
    return all(predicted[name]["p90_s"] <= ROOM * slo[f"{name}_s"] for name in ("ttft", "tpot"))


def num_requests(rate: float, seconds: float, bounds: tuple[int, int]) -> int:
    """Return the requests of so many seconds at *rate*, within bounds."""
    fewest, most = bounds
    return max(fewest, min(most, round(rate * seconds)))


def demo_rate(calibration: Path) -> float:
    """Return the scenario's rate, or one that loads the busier pool to `MOST_USED` at most."""
    rate: float = tomllib.loads(Path(SCENARIO).read_text(encoding="utf-8"))["workload"][
        "requests_per_s"
    ]
    for _ in range(RATE_STEPS):
        used = utilisation(calibration, rate)
        if used is not None and used <= MOST_USED:
            break
        # Almost linear in the rate: a busy pool slows the other one down a little more.
        rate = max(LEAST_RATE, round(rate * (0.95 * MOST_USED / used if used else 1 / 3), 2))
    return rate


def utilisation(calibration: Path, rate: float) -> float | None:
    """Return the predicted utilisation of the busier pool; `None` where the rate saturates it."""
    at_rate = ("--set", f"workload.requests_per_s={rate}", "--json")
    predict = ["predict", SCENARIO, *LAYOUT, "--calibration", str(calibration), *at_rate]
    done = subprocess.run([BIN / "sizing", *predict], check=False, capture_output=True)
    if done.returncode == Exit.NEGATIVE and not done.stdout:
        return None
    if done.returncode not in {Exit.DONE, Exit.NEGATIVE}:  # a missed SLO has its prediction
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


def show(lines: list[str]) -> None:
    """Print what the demo found."""
    sys.stdout.write("\n".join(["", *lines]) + "\n")
    sys.stdout.flush()


def verdict_lines(demo: Demo, first: dict[str, Any]) -> list[str]:
    """Return the verdict of the first load, and the next commands."""
    lines = [f"SLO: {line}" for line in slo_lines(first)]
    others = demo.disturbed_fraction()
    if others > TOO_BUSY:
        lines += [f"{busy_text(others)}: expect larger errors"]
    spent = time.monotonic() - demo.begun_s
    return [
        *lines,
        f"verdict: {first['verdict'].upper()}{'; ' if first['reasons'] else ''}"
        + "; ".join(first["reasons"])[:200],
        f"page:    {OUT / 'report.html'}   (all that was printed: {LOG}; {spent:.0f} s in all)",
        "next:    KEEP=1 make demo             leaves the endpoint up, to try with curl",
        f"         .venv/bin/sizing explain {OUT / 'plan.json'}     each term of the prediction",
        "         .venv/bin/sizing plan llama-3.1-70b-h100        a plan for GPUs",
    ]


def give_up(demo: Demo, failed: StepFailed) -> int:
    """Report the failed command; if other processes explain it, the run is invalid: exit 4."""
    others = demo.disturbed_fraction()
    busy = others > TOO_BUSY and failed.code != Exit.BAD_INPUT  # which is that on any machine
    if failed.code == Exit.BAD_INPUT or (failed.code == Exit.BUG and not busy):
        verdict, code = "failed", failed.code
    elif busy:
        verdict, code = "invalid", Exit.INCONCLUSIVE
    else:
        verdict, code = ("infeasible" if failed.code == Exit.NEGATIVE else "failed"), failed.code
    reasons = [busy_text(others)] if busy else []
    errors = [line for line in failed.said if line.startswith(COMMANDS)]
    reasons += [str(failed), *(errors or failed.said)[-3:]]
    record = {"verdict": verdict, "exit_code": int(code), "reasons": reasons}
    page = Page(title="demo", headline=verdict.upper(), status=verdict, lines=tuple(reasons))
    with suppress(OSError, InputError):  # a full disk, which may be the reason itself
        write_atomically(OUT / "verdict.json", json.dumps(record, indent=2) + "\n")
        write_page(OUT / "report.html", page)
    for reason in reasons:
        demo.screen.say(reason)
    written = f"; page: {OUT / 'report.html'}" if (OUT / "report.html").exists() else ""
    demo.screen.say(f"{verdict.upper()}; all that was printed: {LOG}{written}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
