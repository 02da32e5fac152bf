"""
Measured rows predicted by `sizing` and by other tools: who answers, and how far each is off.

`python benchmarks/scoreboard.py [ROWS.csv …] [--labels CSV] [--envs DIR] [--json FILE] [-o FILE]`
reads tests/published/measured_*.csv where no rows are named. Each tool gets an environment of its
own (venv and pip, kept under --envs), is asked there by a script of benchmarks/clients, and never
sees the measured times. What a tool is asked, row by row (`questions`), follows aiconfigurator's
own adapter of InferenceX records (its sdk/config_adapter/inferencex.py):

- the checkpoint of the row's architecture and weight dtype among those it ships, with the
  quantisation that its config says; else the dtype by name on the nearest checkpoint, else on a
  config.json of our catalog;
- the tables of the nearest engine version that it lets one ask for;
- closed loops: users over replicas and attention ranks as the batch size; a prefill batch of 1 in
  split deployments; nominal lengths; its defaults for everything else;
- static batches: its static mode. It has no mode for open loops: those rows are refused here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from sizing.catalog import find_gpu, find_model, models
from sizing.evidence.errors import class_of, scored
from sizing.evidence.evidence import read_evidence
from sizing.evidence.interval_fit import QUANTITIES
from sizing.evidence.labels import read_labels
from sizing.evidence.row import read_rows
from sizing.evidence.validate import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sizing.evidence.measured_row import Group, MeasuredRow

ROOT = Path(__file__).parents[1]
ROWS = sorted((ROOT / "tests" / "published").glob("measured_*.csv"))
CLIENTS = Path(__file__).parent / "clients"
ENVS = Path.home() / ".cache" / "minicluster" / "scoreboard"
OURS = "sizing"
QUANTISED = {"fp8": "fp8", "fp4": "nvfp4", "int4": "int4_wo", "bf16": "bfloat16"}
"""aiconfigurator's names of the dtypes of weights."""
ARCHITECTURES = {
    "mistral": "LlamaForCausalLM",  # the same layers
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
"""Architectures that aiconfigurator reads from a config.json, by our catalog's model_type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTool:
    """A tool on the package index: what pip installs, and the script that asks it."""

    name: str
    requirement: str
    client: str = "aiconfigurator_estimate.py"


TOOLS = (
    OtherTool(name="aiconfigurator", requirement="aiconfigurator==0.12.0"),
    OtherTool(name="aisimulate", requirement="aisimulate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    What a tool says of one row.

    Attributes:
        reason: why there are no times, or wrong ones.
        answered: as `sizing validate` counts it: times, or a claim of overload that was right.
        mode: of the tool's own modes, the one that answered.
        inside: whether the measurement is in the tool's 80 % interval, by latency, if it has one.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    reason: str = ""
    answered: bool = True
    mode: str = ""
    inside: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """
    Errors of one latency in one class.

    Attributes:
        rows: of the class in which the latency was measured.
        answered: rows with an answer, by tool.
        median: of |predicted / measured - 1| over the rows that the tool answers; `None`: none.
        mean: likewise.
        shared: rows for which every tool gives a number; the last two are errors over these.
        shape: median error of latencies divided by that of the fewest users of their curve: rows
            that differ in users only; over the shared rows.
        on_curves: shared rows that `shape` is made of.
        inside: share of measurements in the tool's 80 % intervals.
        best: tool of the least median over the shared rows.
    """

    row_class: str
    quantity: str
    rows: int
    answered: dict[str, int]
    median: dict[str, float | None]
    mean: dict[str, float | None]
    shared: int
    shared_median: dict[str, float | None]
    shared_mean: dict[str, float | None]
    shape: dict[str, float | None]
    on_curves: int
    inside: dict[str, float | None]
    best: str


def main() -> int:
    """Ask every tool for every row, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("rows", nargs="*", type=Path, default=ROWS)
    parser.add_argument("--labels", type=Path, help="rows to mend or leave out")
    parser.add_argument("--envs", type=Path, default=ENVS, help="where environments are kept")
    parser.add_argument("--json", type=Path, help="scores and answers to write")
    parser.add_argument("-o", "--out", type=Path, help="table to write (Markdown)")
    options = parser.parse_args()
    begun_s, seconds = time.monotonic(), {}
    try:
        rows, ours = our_answers(options.rows, options.labels)
    except InputError as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2
    answers, absent = {OURS: ours}, {}
    seconds[OURS] = time.monotonic() - begun_s
    for tool in TOOLS:
        try:
            python = installed(tool, options.envs / tool.name)
            begun_s = time.monotonic()
            answers[tool.name] = ask(tool, python, rows)
            seconds[tool.name] = time.monotonic() - begun_s
        except ToolUnavailable as error:
            absent[tool.name] = str(error)
    scores = [score for other in list(answers)[1:] for score in compared(rows, answers, other)]
    text = markdown(scores, answers, absent, seconds)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.json:
        by_tool = {name: {i: asdict(a) for i, a in of.items()} for name, of in answers.items()}
        found = {
            "scores": [asdict(s) for s in scores],
            "answers": by_tool,
            "absent": absent,
            "seconds": seconds,
        }
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def our_answers(
    files: Iterable[Path], labels: Path | None
) -> tuple[list[MeasuredRow], dict[str, Answer]]:
    """Predict the rows with `sizing`, as `sizing validate` does; those that count are returned."""
    known, intervals = read_labels(labels) if labels else {}, read_evidence().intervals
    verdicts = [judge(line, intervals) for path in files for line in read_rows(path, known)]
    rows, answers = [], {}
    for verdict in scored(verdicts):
        if verdict.row is not None:
            rows.append(verdict.row)
            found = verdict.found
            answers[verdict.id] = Answer(
                ttft_s=found.ttft_s,
                tpot_s=found.tpot_s,
                reason="" if verdict.answered is not False else found.reason,
                answered=verdict.answered is not False,
                inside={
                    name: around.low_s <= measured_s <= around.high_s
                    for name in QUANTITIES
                    if (around := getattr(verdict, name))
                    and (measured_s := getattr(verdict.row, f"{name}_s"))
                },
            )
    return rows, answers


class ToolUnavailable(Exception):
    """A tool that cannot be installed or asked; the message says why."""


def ask(tool: OtherTool, python: Path, rows: Sequence[MeasuredRow]) -> dict[str, Answer]:
    """
    Ask a tool for all rows, with the *python* of its own environment.

    Raises:
        ToolUnavailable: the script that asks it fails.
    """
    home = python.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        asked, refused = questions(rows, shipped(home), Path(folder))
        question, found = Path(folder) / "questions.json", Path(folder) / "answers.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        run(python, CLIENTS / tool.client, question, found)
        given = json.loads(found.read_text(encoding="utf-8"))
    answers = {name: Answer(reason=reason, answered=False) for name, reason in refused.items()}
    for name, answer in given.items():
        times = {each: answer.get(each) for each in ("ttft_s", "tpot_s")}
        reason, mode = answer.get("reason", ""), answer.get("mode", "")
        answers[name] = Answer(**times, reason=reason, answered=not reason, mode=mode)
    return answers


def installed(tool: OtherTool, home: Path) -> Path:
    """
    Return the Python of a tool's environment, which is made where it is not complete.

    Raises:
        ToolUnavailable: pip cannot install it.
    """
    python, done = home / "bin" / "python", home / "installed.txt"
    if not done.exists():
        if not python.exists():
            run(sys.executable, "-m", "venv", home)
        run(python, "-m", "pip", "install", "--quiet", tool.requirement)
        done.write_text(tool.requirement, encoding="utf-8")
    return python


def run(*command: str | Path) -> None:
    """Run a command; where it fails, the last error that it prints becomes the reason."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        errors = re.findall(r"^.*?(\w*Error: .+|ERROR: .+)$", done.stderr, re.MULTILINE)
        raise ToolUnavailable(errors[-1] if errors else f"exit code {done.returncode}")


def shipped(home: Path) -> dict[str, str]:
    """Return the hub ids of the checkpoints that a tool ships, by catalog entry and dtype."""
    found: dict[str, str] = {}
    for path in sorted(home.glob("lib/python*/site-packages/aiconfigurator_core/model_configs/*")):
        name = path.name.removesuffix("_config.json").replace("--", "/", 1)
        try:
            model = find_model(name)
        except InputError:
            continue
        found |= {
            name: name,
            f"{model.config_hash} {model.weight_dtype}": name,
            model.config_hash: name,
        }
    return found


def questions(
    rows: Iterable[MeasuredRow], known: Mapping[str, str], folder: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the questions for rows that the tool has a mode for, and why the others have none."""
    asked, refused = {}, {}
    for row in rows:
        if row.load == "open":
            refused[row.id] = "no mode for arrivals at a rate"
            continue
        try:
            ask = {**_checkpoint(row, known, folder), **_load(row), **_widths(row)}
        except InputError as error:
            refused[row.id] = f"our catalog, which words the question, has none: {error}"
            continue
        asked[row.id] = {"version": row.engine_version, "ask": ask}
    return asked, refused


def _checkpoint(row: MeasuredRow, known: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Name model, GPU, engine and dtypes in the tool's words."""
    model = find_model(row.model)
    kv = {"fp8": "fp8", "bf16": "bfloat16"}.get(row.kv_dtype)
    common = {
        "system_name": find_gpu(row.gpu).name.replace("-", "_"),
        "backend_name": row.engine.lower(),
        "kvcache_quant_mode": kv,
    }
    if model.weight_dtype == row.weight_dtype and row.model in known:
        return {"model_path": row.model, **common}
    same = known.get(f"{model.config_hash} {row.weight_dtype}")
    if same is not None:
        return {"model_path": same, **common}
    quantised = QUANTISED.get(row.weight_dtype)
    modes = {"gemm_quant_mode": quantised, "moe_quant_mode": quantised if model.moe else None}
    path = known.get(model.config_hash) or _written(row.model, folder)
    return {"model_path": path, **modes, **common}


def _written(name: str, folder: Path) -> str:
    """Write the catalog's config.json of a model that the tool does not ship; return where."""
    source = find_model(name).config_hash
    entry = next(e for key, e in models().items() if find_model(key).config_hash == source)
    config = {key: each for key, each in entry.config.items() if key != "quantization_config"}
    architecture = ARCHITECTURES.get(str(config["model_type"]), str(config["model_type"]))
    place = folder / source
    place.mkdir(exist_ok=True)
    text = json.dumps({**config, "architectures": [architecture]})
    (place / "config.json").write_text(text, encoding="utf-8")
    return str(place)


def _load(row: MeasuredRow) -> dict[str, Any]:
    """Describe lengths and batch; users are shared out to replicas and attention ranks."""
    last = row.groups[-1]
    batch = math.ceil(row.amount / (last.replicas * last.slicing.dp))
    found = {"isl": row.isl, "osl": row.osl, "prefix": row.prefix_tokens}
    if len(row.groups) > 1:
        return {**found, "mode": "disagg", "prefill_batch_size": 1, "decode_batch_size": batch}
    if row.load == "static":
        return {**found, "mode": "static" if row.osl > 1 else "static_ctx", "batch_size": batch}
    return {**found, "mode": "agg", "batch_size": batch}


def _widths(row: MeasuredRow) -> dict[str, int]:
    """Return the widths of each pool; experts are sliced over what their groups leave."""
    if len(row.groups) == 1:
        return _of_pool(row.groups[0])
    found: dict[str, int] = {}
    for group in row.groups:
        widths = {**_of_pool(group), "num_workers": group.replicas}
        found |= {f"{group.role}_{name}": width for name, width in widths.items()}
    return found


def _of_pool(group: Group) -> dict[str, int]:
    s = group.slicing
    experts = {"moe_ep_size": s.ep, "moe_tp_size": s.tp * s.dp // s.ep}
    return {"tp_size": s.tp, "pp_size": s.pp, "attention_dp_size": s.dp, **experts}


def compared(
    rows: Sequence[MeasuredRow], answers: Mapping[str, Mapping[str, Answer]], other: str
) -> list[Score]:
    """Score `sizing` beside one other tool, all rows together and by class."""
    classes: dict[str, list[MeasuredRow]] = {"all": list(rows)}
    for row in rows:
        classes.setdefault(class_of(row), []).append(row)
    pair = {name: answers[name] for name in (OURS, other)}
    return [
        _score(name, quantity, found, pair)
        for name, found in classes.items()
        for quantity in QUANTITIES
        if any(getattr(row, f"{quantity}_s") for row in found)
    ]


def _score(
    name: str,
    quantity: str,
    rows: Sequence[MeasuredRow],
    pair: Mapping[str, Mapping[str, Answer]],
) -> Score:
    measured = {row.id: getattr(row, f"{quantity}_s") for row in rows}
    measured = {key: value for key, value in measured.items() if value}
    errors = {
        tool: {
            key: abs(said / seen - 1)
            for key, seen in measured.items()
            if (said := getattr(given[key], f"{quantity}_s"))
        }
        for tool, given in pair.items()
    }
    shared = set.intersection(*(set(of) for of in errors.values()))
    on_shared = {tool: [of[key] for key in shared] for tool, of in errors.items()}
    medians = {tool: _or_none(median, each) for tool, each in on_shared.items()}
    shapes = {
        tool: _shape_errors(
            [row for row in rows if row.id in shared],
            measured,
            {key: getattr(given[key], f"{quantity}_s") for key in shared},
        )
        for tool, given in pair.items()
    }
    inside = {
        tool: [
            float(given[key].inside[quantity]) for key in measured if quantity in given[key].inside
        ]
        for tool, given in pair.items()
    }
    return Score(
        row_class=name,
        quantity=quantity,
        rows=len(measured),
        answered={t: sum(given[key].answered for key in measured) for t, given in pair.items()},
        median={tool: _or_none(median, of.values()) for tool, of in errors.items()},
        mean={tool: _or_none(mean, of.values()) for tool, of in errors.items()},
        shared=len(shared),
        shared_median=medians,
        shared_mean={tool: _or_none(mean, each) for tool, each in on_shared.items()},
        shape={tool: _or_none(median, each) for tool, each in shapes.items()},
        on_curves=len(shapes[OURS]),
        inside={tool: _or_none(mean, each) for tool, each in inside.items()},
        best=min(medians, key=lambda tool: medians[tool] or 0.0) if shared else "",
    )


def _shape_errors(
    rows: Iterable[MeasuredRow], measured: Mapping[str, float], predicted: Mapping[str, float]
) -> list[float]:
    """Return errors of latencies over that of the fewest users, of rows that differ in no more."""
    curves: dict[tuple[object, ...], list[MeasuredRow]] = {}
    for row in rows:
        key = row.source, row.configuration, row.engine_version, row.load, row.isl, row.osl
        curves.setdefault(key, []).append(row)
    errors = []
    for curve in curves.values():
        first, *others = sorted(curve, key=lambda row: row.amount)
        for row in others:
            seen = measured[row.id] / measured[first.id]
            errors.append(abs(predicted[row.id] / predicted[first.id] / seen - 1))
    return errors


def _or_none(of: Callable[[list[float]], float], values: Iterable[float]) -> float | None:
    found = list(values)
    return of(found) if found else None


def markdown(
    scores: Sequence[Score],
    answers: Mapping[str, Mapping[str, Answer]],
    absent: Mapping[str, str],
    seconds: Mapping[str, float],
) -> str:
    """Write the table of each tool, where it is better, and why it refuses rows."""
    lines: list[str] = []
    for other in list(answers)[1:]:
        own = [score for score in scores if other in score.answered]
        lines += [*_table(own, other), "", _verdict(own, other), *_modes(answers[other]), ""]
        lines += _refusals(answers[other])
    lines += [
        f"{name}: {taken_s:,.0f} s for {len(answers[name]):,} rows."
        for name, taken_s in seconds.items()
    ]
    lines += [f"{name} was not asked: {reason}." for name, reason in absent.items()]
    return "\n".join(lines).strip()


def _table(scores: Sequence[Score], other: str) -> list[str]:
    pair = (OURS, other)
    heads = [
        "rows", "", "measured", f"answered: {OURS}, {other}", "both", f"{OURS}: median / mean",
        f"{other}: median / mean", f"shape: {OURS}, {other}", f"inside: {OURS}",
        f"all that {OURS} answers", f"all that {other} answers",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for s in scores:
        cells = [s.row_class, s.quantity.upper(), str(s.rows)]
        cells += [", ".join(str(s.answered[tool]) for tool in pair), str(s.shared)]
        for tool in pair:
            found = _figures(s.shared_median[tool], s.shared_mean[tool])
            cells.append(f"**{found}**" if s.best == tool else found)
        shapes = [s.shape[tool] for tool in pair]
        cells.append(", ".join("" if each is None else f"{each:.1%}" for each in shapes))
        cells.append("" if s.inside[OURS] is None else f"{s.inside[OURS]:.0%}")
        cells += [_figures(s.median[tool], s.mean[tool]) for tool in pair]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(middle: float | None, average: float | None) -> str:
    return "" if middle is None or average is None else f"{middle:.1%} / {average:.1%}"


def _verdict(scores: Sequence[Score], other: str) -> str:
    """Say in which classes the other tool is better, on the rows that both answer."""
    said = []
    for by in ("median", "mean"):
        errors = [(s, getattr(s, f"shared_{by}")) for s in scores if s.shared]
        found = [
            f"{s.quantity.upper()} of {s.row_class} ({of[other]:.1%} against {of[OURS]:.1%},"
            f" {s.shared} rows)"
            for s, of in errors
            if of[other] < of[OURS]
        ]
        where = "; ".join(found) if found else "nothing"
        said.append(f"By the {by} over the rows that both answer, {other} is better at: {where}.")
    return " ".join(said)


def _modes(answers: Mapping[str, Answer]) -> list[str]:
    """Count the answers by the tool's own modes, if it has some."""
    modes = Counter(answer.mode for answer in answers.values() if answer.mode)
    found = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
    return [f"Answers by mode: {found}."] if found else []


def _refusals(answers: Mapping[str, Answer]) -> list[str]:
    reasons = Counter(" ".join(a.reason.split())[:160] for a in answers.values() if a.reason)
    lines = [f"| {reason.replace('|', '/')} | {count} |" for reason, count in reasons.most_common()]
    return ["| why it has no answer | rows |", "|---|---|", *lines, ""] if lines else []


if __name__ == "__main__":
    sys.exit(main())
