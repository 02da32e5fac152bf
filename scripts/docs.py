"""
Write the generated pages: docs/schema.md, validation.md, seeds.md and training.md.

`make docs` runs it; a test compares what it would write with what stands there. The text of each
page is a template in scripts/templates, the numbers are from `tests/published`, from the evidence
of `sizing validate --evidence`, and from our functions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tomllib
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import seeds
import training_runs
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.catalog.schema import scenario_keys
from sizing.evidence.evidence import read_evidence
from sizing.evidence.measured_row import MeasuredRow
from sizing.evidence.prediction import predict_row
from sizing.evidence.row import read_rows
from sizing.evidence.row_config import nearest_engine
from sizing.latency.op import prefill_load
from sizing.latency.step import step_s
from sizing.latency.term import Machine
from sizing.planner.intervals import DISTANCES
from sizing.report.validation import figures

if TYPE_CHECKING:
    from sizing.evidence.evidence import Claim, Evidence

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
    environment = Environment(  # noqa: S701  (Markdown)
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"f": format, "cell": seeds.cell}
    facts: dict[str, dict[str, Any]] = {
        "schema": {"keys": scenario_keys()},
        "validation": _validation(),
        "seeds": {"claims": seeds.claims(), "titles": seeds.TITLES},
        "training": {"groups": training_runs.groups(), "rows": list(training_runs.rows())},
    }
    return {
        ROOT / "docs" / f"{name}.md": environment.get_template(f"{name}.md").render(**found)
        for name, found in facts.items()
    }


def _validation() -> dict[str, Any]:
    """Return every comparison of a prediction with a measurement."""
    evidence = read_evidence()
    return {
        "evidence": evidence,
        "distances": DISTANCES,
        "slices": [(by, list(found)) for by, found in groupby(evidence.errors, lambda e: e.by)],
        "levels": sorted({each.confidence for each in evidence.claims}),
        "claims": _claims(evidence),
        "figures": figures,
        "static": _static_prefill(),
        "h200": _measured_here(),
        "h200_ops": len((PUBLISHED / "h200_ops.csv").read_text(encoding="utf-8").splitlines()) - 1,
        "ops": _published("op_fits"),
        "demo": _published("demo_runs"),
        "repeats": _published("demo_repeats"),
        "demo_load": _demo_load,
        "aims": AIMS,
        "measurements": (PUBLISHED / "measurements.md").read_text(encoding="utf-8"),
    }


def _published(name: str) -> dict[str, Any]:
    return tomllib.loads((PUBLISHED / f"{name}.toml").read_text(encoding="utf-8"))


def _claims(evidence: Evidence) -> dict[tuple[str, str], list[Claim]]:
    """Return how often a statement "below this limit, with this confidence" is right."""
    found: dict[tuple[str, str], list[Claim]] = {}
    for each in evidence.claims:
        found.setdefault((each.source, each.quantity), []).append(each)
    return found


def _static_prefill() -> dict[str, Any]:
    """Return published times to first token of one prompt alone, with our predictions."""
    table = _published("static_prefill")
    for row in table["rows"]:
        row["predicted_s"] = _prefill_s(row)
        row["error"] = row["predicted_s"] / row["ttft_s"] - 1
    sizes = [abs(row["error"]) for row in table["rows"]]
    return {**table, "mean": sum(sizes) / len(sizes), "largest": max(sizes)}


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


def _measured_here() -> dict[str, Any]:
    """Return our own rows with predictions, and how many lie inside the shipped intervals."""
    intervals, rows = read_evidence().intervals, []
    for row in read_rows(PUBLISHED / "measured_h200.csv"):
        assert isinstance(row, MeasuredRow), row  # noqa: S101  (a file of ours)
        predicted = predict_row(row)
        found: dict[str, Any] = {"model": row.model, "isl": row.isl, "osl": row.osl}
        for name in ("ttft", "tpot"):
            measured_s, value_s = (getattr(of, f"{name}_s") for of in (row, predicted))
            around = intervals.around(value_s, name, predicted.path)
            found[name] = (measured_s, value_s, value_s / measured_s - 1)
            found[f"{name}_inside"] = bool(around and around.low_s <= measured_s <= around.high_s)
        rows.append({"users": round(row.amount), **found})
    medians = {n: statistics.median(abs(row[n][2]) for row in rows) for n in ("ttft", "tpot")}
    inside = {n: sum(row[f"{n}_inside"] for row in rows) for n in ("ttft", "tpot")}
    return {**_published("measured_h200"), "rows": rows, "medians": medians, "inside": inside}


def _demo_load(load: dict[str, Any]) -> list[str]:
    """Return errors of one load of the demo, raw / at the engines' pace, and that pace."""
    cells = []
    for metric in ("ttft", "tpot"):
        rows = [load[f"{metric}_{statistic}"] for statistic in ("mean", "p90")
                if f"{metric}_{statistic}" in load]  # fmt: skip
        texts = (f"{row['error']:+.0%}" + (f" / {row['at_pace']:+.0%}" if row["at_pace"] else "")
                 for row in rows)  # fmt: skip
        cells.append(", ".join(texts))
    return [*cells, ", ".join(f"{factor:.2f}" for factor in load["pace"].values())]


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
