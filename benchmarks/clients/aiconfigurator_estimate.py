"""
Answers of aiconfigurator, or of aisimulate, which keeps its API, to the questions of a file.

Run by benchmarks/scoreboard.py with the Python of the tool's own environment:
`python aiconfigurator_estimate.py QUESTIONS.json ANSWERS.json`. A question has a `version` of the
engine and the arguments of `cli_estimate` under `ask`. An answer has `ttft_s`, `tpot_s`, the
`version` of the tables and their `mode`, or only a `reason`. `HYBRID`, which the tool recommends
for what its tables lack, is asked where `SILICON`, its default, has no answer.
"""

import json
import logging
import re
import sys
from pathlib import Path

from aiconfigurator.cli.api import cli_estimate
from aiconfigurator.sdk.perf_database import get_version_slots

MODES = ("SILICON", "HYBRID")


def answer(question: dict) -> dict:
    """Ask for one row; the tool's own words where it has no answer."""
    reasons = []
    for mode in MODES:
        try:
            asked = dict(question["ask"])
            version = nearest(asked["system_name"], asked["backend_name"], question["version"])
            found = cli_estimate(**asked, backend_version=version, database_mode=mode)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  (its compiled part raises its own kind)
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        times = {"ttft_s": found.ttft / 1e3, "tpot_s": found.tpot / 1e3}
        return {name: value or None for name, value in times.items()} | {
            "version": version,
            "mode": mode,
        }
    return {"reason": reasons[0]}


def nearest(system: str, backend: str, version: str) -> str | None:
    """Return the version with tables that is nearest to the row's; the newest where unknown."""
    slots = get_version_slots(system, backend) or {}
    wanted = numbers(version)
    if not wanted or not slots:
        return slots.get("current")
    return min(
        slots.values(),
        key=lambda each: [abs(a - b) for a, b in zip(numbers(each), wanted, strict=False)],
    )


def numbers(version: str) -> list[int]:
    """Return the first three numbers of a version that begins with one."""
    found = re.match(r"\d+(?:\.\d+){1,2}", version)
    return [int(part) for part in found[0].split(".")] if found else []


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    questions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = {name: answer(question) for name, question in questions.items()}
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")
