"""A plan made from a log: the same requests hold the SLO on it, or the command says no."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minicluster.errors import Exit
from minicluster.plan import read_plan
from tests.sizing.conftest import QUICK, Sizing

SCENARIO = "llama-3.1-8b-h100"
REQUESTS = 3_000


def trace(folder: Path, *, burst: int) -> Path:
    """Write requests at 15 a second, *burst* of them at a time; one of ten is long."""
    rng = np.random.default_rng(1)
    due_s = np.repeat(np.cumsum(rng.exponential(burst / 15, REQUESTS // burst)), burst)
    prompts = np.where(rng.random(REQUESTS) < 0.1, 12_000, 300)
    lines = [
        json.dumps({"due_s": float(due), "input_tokens": int(n), "output_tokens": 150})
        for due, n in zip(due_s, prompts, strict=True)
    ]
    file = folder / "requests.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize(
    ("burst", "code", "said"),
    [(1, Exit.DONE, "holds the SLO: TTFT p99"), (60, Exit.NEGATIVE, "come closer together")],
)
def test_a_plan_carries_the_trace_it_was_made_from(
    sizing: Sizing, tmp_path: Path, burst: int, code: Exit, said: str
) -> None:
    """The mean of one in ten long prompts is planned; bursts that chance has not are found out."""
    file, out = trace(tmp_path, burst=burst), tmp_path / "plan.json"
    done = sizing("plan", SCENARIO, "--set", f"workload.trace={file}", "-o", str(out))
    assert done.code == code, done.err
    assert said in done.err
    assert "3,000 requests at" in done.err
    plan = read_plan(out)
    prompts, _, counts = np.array(plan.workload.lengths).T
    assert np.average(prompts, weights=counts) == pytest.approx(1_470, rel=0.03)
    simulated = sizing("simulate", str(out), "--trace", str(file), "--json")
    assert simulated.code == code
    assert bool(json.loads(simulated.out)["misses"]) == (code == Exit.NEGATIVE)


def test_what_says_how_to_read_a_trace_holds_in_every_command(
    sizing: Sizing, plan_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The same options in `traffic` and `simulate`; what `traffic` writes needs none."""
    trace, written = tmp_path / "trace.jsonl", tmp_path / "written.jsonl"
    rows = [{"timestamp": 3.0 * n, "input_length": 1100, "output_length": 3,
             "hash_ids": list(range(69))} for n in range(20)]  # fmt: skip
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ("--time-unit", "s")
    plan = str(plan_of(*QUICK))
    for command in (("traffic", str(trace)), ("simulate", plan, "--trace", str(trace))):
        refused = sizing(*command)
        assert refused.code == 2
        assert "as seconds 0.3333" in refused.err
    assert "a log" not in (said := sizing("traffic", str(trace), *options, "-o", str(written))).err
    assert "read as Mooncake: seconds, blocks of 16 tokens" in said.err
    of_file, of_written = (
        json.loads(sizing("simulate", plan, "--trace", *each, "--json").out)
        for each in ((str(trace), *options), (str(written),))
    )
    assert of_file == of_written
