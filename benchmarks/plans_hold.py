"""
Do plans hold, and is nothing in them spare?

Each plan is simulated with fresh seeds, ten times as long as the run it passed and with the step
times of its confidence; then with one replica of a pool taken away, on the same seeds until one
misses the SLO.

    python benchmarks/plans_hold.py [--seeds 10] [--longer 10] [SCENARIO ...]

Prints a line a scenario; exits with 1 if a plan is missed once, or holds with a replica less.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sizing.cli.inputs import read_inputs
from sizing.planner.search import Found, search
from sizing.planner.trial import Trials

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.candidate import Candidate

SCENARIOS = (
    "llama-3.1-8b-h100",
    "llama-3.1-70b-h100-2rps",
    "llama-3.1-70b-h100",
    "deepseek-v3-h200",
    "long-context-70b",
    "mixed-gpus-70b",
)
FRESH = 1_000
"""First seed; the search uses 0 and 1."""


def worst(inputs: Inputs, trials: Trials, chosen: Candidate, requests: int, seed: int) -> float:
    """Return the largest share of a limit used up at the SLO's percentile; above 1: missed."""
    slo = inputs.scenario.slo
    slow = chosen.off_by(trials.errors)
    outcome = trials.outcome(slow, requests=requests, seed=seed)
    latencies = outcome.latencies()
    return max(
        latencies[name][slo.percentile].value_s / limit
        for name, limit in slo.limits_s.items()
        if limit is not None and name in latencies
    )


def first_missed(
    inputs: Inputs, trials: Trials, chosen: Candidate, requests: int, seeds: int
) -> float:
    """Return the largest share of a limit on the first seed that misses it, else of all seeds."""
    most = 0.0
    for seed in range(seeds):
        most = max(most, worst(inputs, trials, chosen, requests, FRESH + seed))
        if most > 1:
            break
    return most


def smaller(chosen: Candidate, role: str) -> Candidate | None:
    """Return the plan with one replica less, `None` where it would have none."""
    sizes = {"prefill": 0, **chosen.replicas}
    sizes[role] -= 1
    if sizes[role] < 1:
        return None
    return chosen.sized(sizes["prefill"], sizes.get("decode") or sizes["mixed"])


def judged(name: str, *, seeds: int, longer: int) -> bool:
    """Print and return whether a scenario's plan holds, and is tight."""
    inputs = read_inputs(Path(name), [], None)
    found = search(inputs)
    if not isinstance(found, Found):
        print(f"{name}: {found.reason}")
        return False
    trials = Trials(inputs, found.errors)
    requests = longer * max(each.requests for each in found.verdicts)
    shares = [
        worst(inputs, trials, found.candidate, requests, FRESH + seed) for seed in range(seeds)
    ]
    violations = sum(share > 1 for share in shares)
    less = {}
    for role in found.candidate.replicas:
        fewer = smaller(found.candidate, role)
        less[role] = None if fewer is None else first_missed(inputs, trials, fewer, requests, seeds)
    broken = any(share is None or share > 1 for share in less.values())
    print(
        f"{name}: {found.candidate}, {found.candidate.gpus} GPUs:"
        f" {violations} violations in {seeds} x {requests:,} requests"
        f" (worst {max(shares):.3f} of the limit); one replica less: "
        + ", ".join(
            f"{role} {'none left' if share is None else f'{share:.2f}'}"
            for role, share in less.items()
        )
    )
    return violations == 0 and broken


def main() -> int:
    """Judge all scenarios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("scenarios", nargs="*", default=SCENARIOS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--longer", type=int, default=10)
    options = parser.parse_args()
    good = [judged(name, seeds=options.seeds, longer=options.longer) for name in options.scenarios]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
