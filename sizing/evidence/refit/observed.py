"""A load test as a refit reads it: `samples.jsonl` beside its plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from minicluster.errors import InputError
from minicluster.plan import Deployment, StepModel, read_plan
from minicluster.specs.calibration import CalibrationSpec
from minicluster.workload.arrivals import Arrivals
from minicluster.workload.request_outcome import turned_away

if TYPE_CHECKING:
    from pathlib import Path


FEWEST = 50
"""Answered requests below which a run says nothing about constants."""

WRITTEN = "samples as `loadtest run` writes them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """
    One run.

    Attributes:
        name: of its file.
        deployment: what ran.
        step_model: that it was planned with.
        calibration: behind that; `None`: it came from the datasheet.
        arrivals: every request that came as far as an engine, shape (n,).
        counts: those that were measured and answered, less the warm-up that the verdict cut,
            shape (n,).
        ttft_s, tpot_s: of each, nan where it has none, shape (n,).
        phases_s: phases of TTFT that the server reported, by name; nan: not reported; shape (n,).
        verdict: of the run; `None`: the run was not judged.
        turned_away: requests sent besides, which no engine saw.
    """

    name: str
    deployment: Deployment
    step_model: StepModel
    calibration: CalibrationSpec | None
    arrivals: Arrivals
    counts: NDArray[np.bool_]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    phases_s: dict[str, NDArray[np.float64]]
    verdict: str | None = None
    turned_away: int = 0


def read_observed(samples: Path, plan: Path | None) -> Observed:
    """
    Read a run.

    Args:
        samples: `samples.jsonl` of `loadtest run`; `verdict.json` beside it says from when on
            they count, without it the window of the run does; `schedule.jsonl` what they share.
        plan: that was deployed; `None`: `plan.json` beside the samples.

    Raises:
        InputError: no such file, a line that is no sample, no verdict where one should be, too few
            answers, or a plan that another model was served from.
    """
    deployed = read_plan(plan or samples.parent / "plan.json")
    return observed(samples, deployed.deployment, deployed.step_model, deployed.inputs.calibration)


def observed(
    samples: Path,
    deployment: Deployment,
    step_model: StepModel,
    calibration: CalibrationSpec | None,
) -> Observed:
    """Read a run of *deployment*, whose step times are *step_model*; raises as `read_observed`."""
    _check_model(samples, deployment)
    sent = _rows(samples)
    rows = [row for row in sent if not turned_away(row["outcome"], str(row.get("detail")))]
    rows.sort(key=lambda row: (row["due_s"], row["index"]))
    answered = [row["outcome"] == "ok" and bool(row["chunk_s"]) for row in rows]
    verdict, start_s = _verdict(samples.parent / "verdict.json")
    counts = np.array(
        [
            ok and row["in_window"] and row["due_s"] >= start_s
            for ok, row in zip(answered, rows, strict=True)
        ]
    )
    if counts.sum() < FEWEST:
        raise InputError(
            str(samples),
            f"{int(counts.sum())} answered requests that count",
            f"at least {FEWEST}",
            "a longer `loadtest run`",
        )
    names = sorted({name for row in rows for name in row.get("phases_s", {})})
    return Observed(
        name=str(samples),
        deployment=deployment,
        step_model=step_model,
        calibration=calibration,
        arrivals=_arrivals(rows, samples.parent / "schedule.jsonl"),
        counts=counts,
        ttft_s=np.array(
            [
                row["chunk_s"][0] - row["due_s"] if ok else np.nan
                for ok, row in zip(answered, rows, strict=True)
            ]
        ),
        tpot_s=np.array([_tpot_s(row) for row in rows]),
        phases_s={
            name: np.array([row.get("phases_s", {}).get(name, np.nan) for row in rows])
            for name in names
        },
        verdict=verdict,
        turned_away=len(sent) - len(rows),
    )


def _verdict(path: Path) -> tuple[str | None, float]:
    """Return what was found, and from when on the run was settled; no verdict: `None`, -inf."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return str(found["verdict"]), float(found["window"]["start_s"])
    except FileNotFoundError:
        return None, -np.inf
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: verdict, window.start_s",
            f"{error}"[:80],
            "a verdict as `loadtest run` writes it",
            "`loadtest report` writes it anew",
        ) from None


def _arrivals(rows: list[dict[str, Any]], schedule: Path) -> Arrivals:
    """Return when requests came, how long they were, and what their prompts share."""
    due = np.array([row["due_s"] for row in rows], dtype=np.float64)
    content, prefix, session = _shared(schedule, [row["index"] for row in rows])
    return Arrivals(
        due_s=due - due[0],
        input_tokens=np.array([row["asked_input_tokens"] for row in rows], dtype=np.int64),
        output_tokens=np.array([row["asked_output_tokens"] for row in rows], dtype=np.int64),
        content=content if any(content) else None,
        prefix_tokens=np.array(prefix, dtype=np.int64) if any(prefix) else None,
        session=np.array(session, dtype=np.int64) if max(session) >= 0 else None,
    )


def _shared(
    schedule: Path, indices: list[int]
) -> tuple[tuple[tuple[int, ...], ...], list[int], list[int]]:
    """Return blocks, prefix and conversation of each request; without a schedule it has none."""
    try:
        text = schedule.read_text(encoding="utf-8") if schedule.exists() else ""
        asked = {row["index"]: row for row in map(json.loads, text.splitlines())}
        those = [asked.get(index, {}) for index in indices]
        return (
            tuple(tuple(row.get("content", ())) for row in those),
            [int(row.get("prefix_tokens", 0)) for row in those],
            [-1 if row.get("session") is None else int(row["session"]) for row in those],
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            str(schedule), f"{error}"[:80], "a schedule as `loadtest run` writes it"
        ) from None


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise InputError(str(path), error.strerror, WRITTEN) from None
    except UnicodeDecodeError:
        raise InputError(str(path), "binary data", WRITTEN) from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            _tpot_s(row)
            float(row["due_s"]), int(row["asked_input_tokens"]), int(row["asked_output_tokens"])
            bool(row["in_window"]), int(row["index"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"{path}:{number}", f"{error}"[:80], WRITTEN) from None
        rows.append(row)
    if not rows:
        raise InputError(str(path), "an empty file", WRITTEN)
    return rows


def _tpot_s(row: dict[str, Any]) -> float:
    """TPOT as docs/model.md defines it; nan for one token."""
    chunks, tokens = row["chunk_s"], row["chunk_tokens"]
    first = tokens[0] if tokens else 1
    after = (row["output_tokens"] or 0) - first
    if row["outcome"] != "ok" or after <= 0 or len(chunks) < 2:  # noqa: PLR2004
        return float("nan")
    return float(chunks[-1] - chunks[0]) / after


def _check_model(samples: Path, deployment: Deployment) -> None:
    """Refuse another model than the run asked for, where the run's order is there."""
    order = samples.parent / "run.json"
    try:
        served = json.loads(order.read_text(encoding="utf-8"))["model"]
    except (OSError, KeyError, TypeError, ValueError):
        return
    if served != deployment.model.id:
        raise InputError(
            f"{order}: model",
            served,
            f"{deployment.model.id}, the plan's",
            "the plan that was deployed",
        )
