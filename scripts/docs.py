"""
Write the generated pages of docs: schema, supported, validation with evidence, seeds, training.

`make docs` runs it, and a test compares its output with the pages. The text of each page is a
template in scripts/templates; the numbers come from `tests/published`, from the evidence of
`sizing validate --evidence`, and from our functions.
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
import supported
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
from sizing.report.validation import figures

if TYPE_CHECKING:
    from sizing.evidence.evidence import Claim, Evidence, HeldOutCoverage

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "published"

AIMS = {
    "ttft_mean": ("TTFT mean", 0.15),
    "ttft_p99": ("TTFT p99", 0.25),
    "tpot_mean": ("TPOT mean", 0.10),
}
"""Largest error of a held-out load, by quantity, that we aim for."""

HARDWARE = {
    "MoE, serving, Blackwell": "B200, B300; vLLM, SGLang",
    "MoE, serving, Hopper": "H100, H200; vLLM, TensorRT-LLM, SGLang",
    "dense, serving, Blackwell": "B200; vLLM, TensorRT-LLM",
    "dense, serving, Hopper": "H100, H200; vLLM, TensorRT-LLM, SGLang",
    "open loop": "11 kinds of GPU; vLLM, TensorRT-LLM, SGLang",
    "split": "GB200, H100; TensorRT-LLM, SGLang",
    "static": "H200, H100, A100, GH200, L40S; TensorRT-LLM",
}
"""Hardware and engines of each class: the evidence holds no rows."""


def pages() -> dict[Path, str]:
    """Return every generated page by its file."""
    environment = Environment(  # noqa: S701  (Markdown)
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"f": format, "cell": seeds.cell, "f_code": "`{}`".format}
    training = {"groups": training_runs.groups(), "rows": list(training_runs.rows())}
    claims = seeds.claims()
    evidence = read_evidence()
    validation = _validation(evidence) | {
        "training_rows": len(training["rows"]),
        "seed_claims": sum(claim.kind != "context" for claim in claims),
    }
    facts: dict[str, dict[str, Any]] = {
        "schema": {"keys": scenario_keys()},
        "supported": {**supported.facts(evidence), "date": evidence.date},
        "validation": validation,
        **{f"evidence/{name}": validation for name in ("rows", "h200", "ops", "demo")},
        "seeds": {"claims": claims, "titles": seeds.TITLES},
        "training": training,
    }
    return {
        ROOT / "docs" / f"{name}.md": environment.get_template(f"{name}.md").render(**values)
        for name, values in facts.items()
    }


def _validation(evidence: Evidence) -> dict[str, Any]:
    """Return every comparison of a prediction with a measurement."""
    ops, demo, repeats = (_published(name) for name in ("op_fits", "demo_runs", "demo_repeats"))
    return {
        "evidence": evidence,
        "without": _without(evidence),
        "slices": [(by, list(errors)) for by, errors in groupby(evidence.errors, lambda e: e.by)],
        "classes": _classes(evidence),
        "left_out": {(c.split, c.name, c.quantity): c for c in evidence.left_out},
        "levels": sorted({claim.confidence for claim in evidence.claims}),
        "claims": _claims(evidence),
        "figures": figures,
        "static": _static_prefill(),
        "h200": _measured_here(evidence),
        "h200_ops": len((PUBLISHED / "h200_ops.csv").read_text(encoding="utf-8").splitlines()) - 1,
        "ops": ops,
        "op_error": statistics.mean(fit["median_error"] for fit in ops["fits"]),
        "demo": demo,
        "held_out": _largest_after_refit(demo["held_out"]["loads"]),
        "repeats": repeats,
        "quiet": _quiet([run for run in repeats["runs"] if run["loops"] == 0]),
        "demo_load": _demo_load,
        "aims": AIMS,
    }


def _without(evidence: Evidence) -> list[tuple[str, dict[str, HeldOutCoverage]]]:
    """Return the coverage of every split over all rows; of few families, by how many were kept."""
    found: dict[str, dict[str, HeldOutCoverage]] = {}
    for held in evidence.left_out:
        few = held.split == "families"
        if held.of == ("group" if few else "all"):
            every = f"all families but {held.name}"
            name = every if few else f"each {held.split.replace('+', ' and ')}"
            found.setdefault(name, {})[held.quantity] = held
    return list(found.items())


def _classes(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """Return errors by class of rows, and coverage with the row's family left out."""
    inside = {
        (held.name, held.quantity): held for held in evidence.left_out if held.split == "family"
    }
    classes = {}
    for errors in evidence.errors:
        if errors.by == "class":
            ttft, tpot = (inside[errors.name, quantity] for quantity in ("ttft", "tpot"))
            classes[errors.name] = {
                "where": HARDWARE[errors.name],
                "rows": errors.rows,
                "infeasible": errors.infeasible,
                "ttft_p99": errors.ttft_p99,
                "errors": f"{_percent(ttft.median_error)} / {_percent(tpot.median_error)} %",
                "ttft": ttft,
                "tpot": tpot,
            }
    return classes


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _largest_after_refit(loads: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest error of the held-out loads, by label of `AIMS`."""
    return {
        label: max(
            abs(sum(load[f"{name}_after_s"]) / sum(load[f"{name}_measured_s"]) - 1)
            for load in loads
        )
        for name, (label, _) in AIMS.items()
    }


def _quiet(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the range of errors of means over the first loads of the demo's quiet runs."""
    ranges = {"runs": str(len(runs))}
    for metric in ("ttft", "tpot"):
        rows = [run["first"][f"{metric}_mean"] for run in runs]
        for key, name in (("error", metric), ("at_pace", f"{metric}_at_pace")):
            errors = [row[key] for row in rows]
            ranges[name] = f"{min(errors):+.0%} to {max(errors):+.0%}"
    return ranges


def _published(name: str) -> dict[str, Any]:
    return tomllib.loads((PUBLISHED / f"{name}.toml").read_text(encoding="utf-8"))


def _claims(evidence: Evidence) -> dict[tuple[str, str], list[Claim]]:
    """Return how often a statement "below this limit, with this confidence" is right."""
    claims: dict[tuple[str, str], list[Claim]] = {}
    for claim in evidence.claims:
        claims.setdefault((claim.source, claim.quantity), []).append(claim)
    return claims


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


def _measured_here(evidence: Evidence) -> dict[str, Any]:
    """Return our own rows with predictions, and how many are inside intervals without them."""
    rows = []
    for row in read_rows(PUBLISHED / "measured_h200.csv"):
        assert isinstance(row, MeasuredRow), row  # noqa: S101  (a file of ours)
        predicted = predict_row(row)
        facts: dict[str, Any] = {"model": row.model, "isl": row.isl, "osl": row.osl}
        for name in ("ttft", "tpot"):
            measured_s, value_s = (getattr(of, f"{name}_s") for of in (row, predicted))
            facts[name] = (measured_s, value_s, value_s / measured_s - 1)
        rows.append({"users": round(row.amount), **facts})
    medians = {n: statistics.median(abs(row[n][2]) for row in rows) for n in ("ttft", "tpot")}
    own = {each.quantity: each for each in evidence.coverage if each.source == "minicluster"}
    inside = {name: round(each.covered_fraction * each.rows) for name, each in own.items()}
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
