"""
Write the generated pages: docs/schema.md, validation.md, seeds.md and training.md.

`make docs` runs it; a test compares what it would write with what stands there.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import measured_rows
import numpy as np
import seeds
import training_runs

from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.catalog.schema import scenario_keys
from sizing.evidence.row_config import nearest_engine
from sizing.latency.load import prefill_load
from sizing.latency.step import Machine, step_s

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "published"

AIMS = {
    "ttft_mean": ("TTFT mean", 0.15),
    "ttft_p99": ("TTFT p99", 0.25),
    "tpot_mean": ("TPOT mean", 0.10),
}
"""Largest error of a held-out load, by quantity, that we aim for."""


def pages() -> dict[Path, str]:
    """Return every generated page by its file."""
    docs = ROOT / "docs"
    return {
        docs / "schema.md": schema_page(),
        docs / "validation.md": validation_page(),
        docs / "seeds.md": seeds.page(),
        docs / "training.md": training_runs.page(),
    }


def schema_page() -> str:
    """Every scenario key."""
    lines = [
        "# Scenario keys",
        "",
        "`make docs` generates this page from the specs; `sizing schema` prints the same.",
        "",
        "| key | type | unit | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for key in scenario_keys():
        default = "required" if key.required else "" if key.default is None else f"{key.default}"
        lines.append(f"| `{key.key}` | {key.type} | {key.unit} | {default} | {key.meaning} |")
    return "\n".join(lines) + "\n"


def validation_page() -> str:
    """Every comparison of a prediction with a measurement."""
    return (
        "\n".join(
            [
                *_opening(),
                *measured_rows.real_engines(),
                *measured_rows.COLUMNS,
                *_static_rows(),
                *_op_fits(),
                *_demo_runs(),
                *_demo_repeats(),
                *_held_out(),
            ]
        )
        + "\n\n"
        + (PUBLISHED / "measurements.md").read_text(encoding="utf-8")
    )


def _opening() -> list[str]:
    return [
        "# Predicted against measured",
        "",
        (
            "`make docs` generates this page from `tests/published` and from the evidence that"
            " `sizing validate ROWS.csv --evidence configs/validation/evidence.json` writes. A"
            " prediction that is not on this page was not compared with a measurement. The sections"
            " from [Engines on shared cores](#engines-on-shared-cores) on are measurements behind"
            " the decisions in [docs/adr](adr)."
        ),
        "",
    ]


def _static_rows() -> list[str]:
    """Time to first token of one prompt alone, against published tables."""
    table = tomllib.loads((PUBLISHED / "static_prefill.toml").read_text(encoding="utf-8"))
    lines = [
        "## One prompt alone, no queue",
        "",
        (
            f"The source is {table['source']}, read on {table['date']}. No constant was fitted on"
            " these rows."
        ),
        "",
        "| model | GPU | weights | TP | prompt | measured ms | predicted ms | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for row in table["rows"]:
        predicted_s = _prefill_s(row)
        error = predicted_s / row["ttft_s"] - 1
        errors.append(abs(error))
        lines.append(
            f"| {row['model']} | {row['gpu']} | {row['weight_dtype']} | {row['tp']} |"
            f" {row['input_tokens']} | {row['ttft_s'] * 1e3:.0f} | {predicted_s * 1e3:.0f} |"
            f" {error:+.0%} |"
        )
    lines += [
        "",
        f"The mean absolute error is {np.mean(errors):.1%}, the largest {max(errors):.0%}.",
        "",
    ]
    return lines


def _prefill_s(row: dict[str, Any]) -> float:
    """Predict one row as tests/sizing/latency/test_step.py does."""
    gpu = catalog.find_gpu(row["gpu"])
    machine = Machine(
        model=replace(catalog.find_model(row["model"]), weight_dtype=row["weight_dtype"]),
        gpu=gpu,
        cluster=next(c for c in catalog.clusters().values() if c.gpu == gpu.name),
        engine=nearest_engine("trtllm", "0.5", catalog.engines())[0],
    )
    return float(step_s(machine, prefill_load(row["input_tokens"]), slicing=Slicing(tp=row["tp"])))


def _op_fits() -> list[str]:
    """Return how well the constants of configs/gpus reproduce the op tables of their fit."""
    table = tomllib.loads((PUBLISHED / "op_fits.toml").read_text(encoding="utf-8"))
    lines = [
        "## Ops, one by one",
        "",
        (
            "The table shows the mean (median) error of the fits of `benchmarks/fit_ops.py`,"
            f" {table['date']}. The data are {table['source']}, with the shortest time of each"
            " shape over engines and kernels."
        ),
        "",
        "| op | " + " | ".join(gpus := sorted({row["gpu"] for row in table["fits"]})) + " |",
        "|---|" + "---|" * len(gpus),
    ]
    found = {(row["op"], row["gpu"]): row for row in table["fits"]}
    for op in sorted({row["op"] for row in table["fits"]}):
        cells = [
            f"{row['mean_error']:.0%} ({row['median_error']:.0%})" if row else ""
            for row in (found.get((op, gpu)) for gpu in gpus)
        ]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _demo_runs() -> list[str]:
    """Whole systems under load: `make demo` on our machine."""
    table = tomllib.loads((PUBLISHED / "demo_runs.toml").read_text(encoding="utf-8"))
    lines = [
        "## A whole split system under load",
        "",
        (
            f"`make demo` and `benchmarks/held_out.py` ran on {table['machine']}, {table['date']},"
            " with one prefill and one decode replica and Poisson arrivals. The predictions use a"
            " calibration that saw neither these lengths nor this rate."
        ),
        "",
        "| run | requests/s | TTFT mean ms (predicted) | TTFT p99 | TPOT mean | TPOT p99 |",
        "|---|---|---|---|---|---|",
    ]
    for number, run in enumerate(table["runs"], start=1):
        cells = [
            f"{run[f'{name}_s'] * 1e3:.0f} ({run[f'predicted_{name}_s'] * 1e3:.0f},"
            f" {run[f'predicted_{name}_s'] / run[f'{name}_s'] - 1:+.0%})"
            for name in ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99")
        ]
        lines.append(f"| {number} | {run['requests_per_s']:.2f} | " + " | ".join(cells) + " |")
    notes = [f"Run {n}: {run['note']}." for n, run in enumerate(table["runs"], 1) if "note" in run]
    return [*lines, "", *notes]


def _demo_repeats() -> list[str]:
    """Return whether the demo always ends, on a quiet machine and beside busy loops."""
    table = tomllib.loads((PUBLISHED / "demo_repeats.toml").read_text(encoding="utf-8"))
    lines = [
        "",
        "### The demo, again and again",
        "",
        (
            f"`benchmarks/demo_runs.py` ran on {table['machine']}, {table['date']}, with nothing"
            " else running but the busy loops named. The errors are predicted / measured - 1 of"
            " mean TTFT and mean TPOT. The first load is predicted with constants from timed steps"
            " and a burst, the second, at another rate, after a refit to the first."
        ),
        "",
        (
            "| run | busy loops | seconds | exit | verdict | others' share | judged | first load |"
            " second load | left running |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for number, run in enumerate(table["runs"], start=1):
        first, second = (
            ", ".join(f"{run[which][name]:+.0%}" for name in ("ttft", "tpot") if name in run[which])
            for which in ("first", "second")
        )
        judged = " and ".join(map(str, run["requests"]))
        lines.append(
            f"| {number} | {run['loops']} | {run['seconds']} | {run['exit_code']} |"
            f" {': '.join([run['verdict'], *run['reasons'][:1]])} |"
            f" {run['others_fraction']:.0%} | {judged} | {first} | {second} |"
            f" {run['left']} |"
        )
    return [*lines, "", *(f"{note[0].upper()}{note[1:]}." for note in table["notes"])]


def _held_out() -> list[str]:
    """Loads that nothing was fitted on, before and after recalibration."""
    table = tomllib.loads((PUBLISHED / "demo_runs.toml").read_text(encoding="utf-8"))["held_out"]
    scales = ", ".join(f"{name} {value:g}" for name, value in table["scales"].items())
    lines = [
        "",
        "### Loads held out of a recalibration",
        "",
        (
            f"`benchmarks/held_out.py FOLDER {table['requests']}` ran on {table['date']}. A fresh"
            " calibration was refitted (eq. C4) to two loads of 400 requests, each sent twice. Five"
            f" other loads of {table['requests']} requests, each sent twice, are predicted for the"
            f" requests that were sent. The factors found are {scales}. The errors are those of the"
            " mean of both runs."
        ),
        "",
        "| load | requests/s | | measured ms, both runs | apart | before | after | aim |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load in table["loads"]:
        for name, (label, aim) in AIMS.items():
            seen, before, after = (
                load[f"{name}_{which}_s"] for which in ("measured", "before", "after")
            )
            middle = sum(seen) / len(seen)
            apart = (max(seen) - min(seen)) / middle
            errors = [sum(each) / sum(seen) - 1 for each in (before, after)]
            lines.append(
                f"| {load['name']} | {load['requests_per_s']:g} | {label} |"
                f" {' and '.join(f'{1e3 * value:.1f}' for value in seen)} | {apart:.0%} |"
                f" {errors[0]:+.0%} | {errors[1]:+.0%} | {aim:.0%} |"
            )
    return lines


def main() -> int:
    """Write the pages; with --check, only report the stale ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args().check
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if stale:
        print("stale:" if check else "written:", ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
