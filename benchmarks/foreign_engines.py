"""
Try a calibration on simulated engines with drawn step times: predicted beside measured latencies.

    python benchmarks/foreign_engines.py --seed 1      # 8 minutes on 2 quiet cores

The engines are simulated (`serving up --step-times`): each part of their steps is 0.6 to 1.8 times
the plan's, drawn once by the seed, with overheads that the sizer has no constants for, CUDA graphs'
padding, and another token budget and batch limit than the default. `sizing calibrate` meets them
as it meets a machine's own engines, and sees no more of them than times. The loads are open loops
at shares of the capacity that the plan from that calibration has. Steps take --slower times as long
as a GPU's, so that what endpoint and client take of these cores weighs as much less.

Prints predicted, measured and the error of each statistic, and leaves all files in --out.
Exit code 1 if an error is beyond 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.command import run_child, terminable, uninterrupted
from minicluster.engine_model.true_steps import drawn
from minicluster.errors import Exit
from minicluster.files import write_atomically
from minicluster.plan import read_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

BIN = Path(sys.executable).parent
SHARES = (0.3, 0.6, 0.85)
"""Loads, as shares of the plan's capacity."""

LOAD_S, FEWEST, WARM_UP_S = 100.0, 250, 10
"""Seconds of a load, the fewest requests that give a p99, and seconds before they count."""

METRICS, STATISTICS = ("ttft", "tpot", "e2e"), ("mean", "p50", "p90", "p99")
LIMIT = 0.05

LIMIT_S = 420
"""Longest time of a command."""

SCENARIO = """
[model]
id = "{model}"
max_context_tokens = 2048

[cluster]
preset = "h200-8"
max_gpus = 2

[workload]
requests_per_s = {rate}
input_tokens = {{ distribution = "uniform", low = 300, high = 1500 }}
output_tokens = {{ distribution = "uniform", low = 40, high = 160 }}

[slo]
ttft_s = {ttft_s}
tpot_s = {tpot_s}
percentile = "p50"

[engine]
name = "vllm"
version = "0.29.0"
{engine}

[search]
pools = "split"
"""
OTHER_SETTINGS = "max_num_seqs = 16\nmax_num_batched_tokens = 1024"

RATE_PER_S, TTFT_S, TPOT_S = 8.0, 2.0, 0.05
"""Rate of the scenario, at a GPU's pace: the calibration's burst takes it, the loads do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One statistic of one load."""

    share: float
    requests_per_s: float
    requests: int
    metric: str
    statistic: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Return predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


def main() -> int:
    """Run the loop; print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slower", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path("out/foreign"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rate = write_scenario(asked.out, "llama-3.1-8b", asked.slower, OTHER_SETTINGS)
    engines = draw_engines(asked.out, asked.seed, asked.slower)
    return judged(loop(asked.out, engines, rate=rate, shares=SHARES, load_s=LOAD_S))


def write_scenario(out: Path, model: str, slower: float, engine: str) -> float:
    """Write scenario.toml, of steps so much *slower* than a GPU's; return its rate."""
    rate = RATE_PER_S / slower
    pace = {"rate": rate, "ttft_s": TTFT_S * slower, "tpot_s": TPOT_S * slower}
    text = SCENARIO.format(model=model, engine=engine, **pace)
    write_atomically(out / "scenario.toml", text)
    return rate


def draw_engines(out: Path, seed: int, slower: float) -> tuple[str, str]:
    """Write the step times of engines beside scenario.toml; return the options that name them."""
    typed(out, "sizing", "plan", "scenario.toml", "-o", "datasheet.json")
    rng = random.Random(seed)  # noqa: S311  (no secret)
    truth = drawn(read_plan(out / "datasheet.json").step_model, rng).scaled(slower)
    write_atomically(out / "truth.json", json.dumps(asdict(truth)) + "\n")
    return ("--step-times", "truth.json")


def loop(
    out: Path, engines: Sequence[str], *, rate: float, shares: Sequence[float], load_s: float
) -> list[Row]:
    """
    Calibrate scenario.toml, plan, serve and load; take everything down; return what was found.

    Args:
        out: folder of the scenario, where every command runs; errors.json has each load as soon as
            it is judged, steps.jsonl how each command ended.
        engines: options that name simulated engines; none: this machine's.
        rate: of the plan whose capacity the loads are *shares* of.
        load_s: seconds of each load.
    """
    os.environ["MINICLUSTER_ADMISSION"] = "off"  # a request turned away is none of the simulation's
    rows: list[Row] = []
    try:
        with terminable():
            calibrate = ("sizing", "calibrate", "scenario.toml", "--engine", *engines, "--again")
            typed(out, *calibrate, "--keep", "-o", "calibration.json")
            capacity = planned(out, rate, "plan.json")["capacity_requests_per_s"]
            simulated = ("--engine", "simulated", *engines) if engines else ()
            typed(out, "serving", "up", "plan.json", "--port", "0", *simulated)
            for share in shares:
                rows += load(out, share, round(share * capacity, 3), load_s)
                errors = [asdict(row) | {"error": row.error} for row in rows]
                write_atomically(out / "errors.json", json.dumps(errors, indent=1) + "\n")
    finally:
        with uninterrupted():
            typed(out, "serving", "down", endings=range(256))
    return rows


def load(out: Path, share: float, rate: float, load_s: float) -> list[Row]:
    """Plan for a rate, and send it to what is up; return predicted and measured."""
    state = json.loads((out / ".minicluster/serving/state.json").read_text(encoding="utf-8"))
    requests = max(FEWEST, round(load_s * rate))
    planned(out, rate, f"plan-{share:g}.json")
    extent = ("--requests", str(requests), "--warmup", str(WARM_UP_S), "-o", f"load-{share:g}")
    host = ("--host", state["base_url"])
    typed(out, "loadtest", "run", f"plan-{share:g}.json", *host, *extent, endings=TRUST)
    return compared(out / f"load-{share:g}/verdict.json", share, rate, requests)


def judged(rows: Sequence[Row]) -> int:
    """Print the table; return 1 if an error is beyond the limit."""
    print_table(rows)
    return int(any(abs(row.error) > LIMIT for row in rows))


TRUST = (Exit.DONE, Exit.NEGATIVE, Exit.INCONCLUSIVE)
"""Exit codes of commands that have an answer, be it that an SLO is missed."""


def planned(out: Path, rate: float, name: str) -> dict[str, Any]:
    """Plan for a rate with the calibration; return the prediction."""
    at_rate = ("--set", f"workload.requests_per_s={rate}", "--calibration", "calibration.json")
    typed(out, "sizing", "plan", "scenario.toml", *at_rate, "-o", name)
    prediction: dict[str, Any] = json.loads((out / name).read_text(encoding="utf-8"))["prediction"]
    return prediction


def compared(verdict: Path, share: float, rate: float, requests: int) -> list[Row]:
    """Return the statistics of a load beside those of its own requests, simulated."""
    compared_rows = json.loads(verdict.read_text(encoding="utf-8"))["comparison"]["rows"]
    by_name = {(row["metric"], row["statistic"]): row for row in compared_rows}
    return [
        Row(
            share=share,
            requests_per_s=rate,
            requests=requests,
            metric=metric,
            statistic=statistic,
            predicted_s=by_name[metric, statistic]["predicted_s"],
            measured_s=by_name[metric, statistic]["measured_s"],
        )
        for metric in METRICS
        for statistic in STATISTICS
    ]


def print_table(rows: Sequence[Row]) -> None:
    """Print a line for each statistic: predicted and measured ms, and the error, at each load."""
    loads = dict.fromkeys((row.share, row.requests_per_s, row.requests) for row in rows)
    titles = (f"{share:.0%}: {rate:g}/s, {n} requests" for share, rate, n in loads)
    print("\nstatistic    " + "  ".join(f"{title:28}" for title in titles))
    for metric in METRICS:
        for statistic in STATISTICS:
            those = [row for row in rows if (row.metric, row.statistic) == (metric, statistic)]
            cells = (
                f"{row.predicted_s * 1e3:8.1f} {row.measured_s * 1e3:8.1f} {row.error:+8.1%}   "
                for row in those
            )
            print(f"{metric.upper():5} {statistic:5} " + "  ".join(cells))
    worst = max(rows, key=lambda row: abs(row.error))
    where = f"{worst.metric.upper()} {worst.statistic} at {worst.share:.0%}"
    print(f"worst: {where}: {worst.error:+.1%}")


def typed(out: Path, *words: str, endings: Sequence[int] = (Exit.DONE,)) -> None:
    """
    Run a command in the folder *out*, as if it had been typed there, for `LIMIT_S` at most.

    Raises:
        SystemExit: it ended with another exit code than those of *endings*.
    """
    print("\n$ " + " ".join(words), flush=True)
    begun_s = time.monotonic()
    limited = ["timeout", "--signal=INT", "--kill-after=30", str(LIMIT_S)]
    code = run_child([*limited, str(BIN / words[0]), *words[1:]], cwd=out, env=dict(os.environ))
    with (out / "steps.jsonl").open("a", encoding="utf-8") as file:
        ended = {"command": words, "exit_code": code, "seconds": time.monotonic() - begun_s}
        file.write(json.dumps(ended) + "\n")
    if code not in endings:
        raise SystemExit(code)


if __name__ == "__main__":
    sys.exit(main())
