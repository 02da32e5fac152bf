"""Checks of the runs of a refit: sound, of one machine and of one calibration."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.specs.calibration import CalibrationSpec
    from sizing.evidence.refit.observed import Observed

SOUND = ("met", "missed", "inconclusive")
"""Verdicts of runs whose latencies are what they seem; the others prove nothing."""

MOST_TURNED_AWAY = 0.2
"""
Share of the requests that may have been rejected. Admission control rejects when queues are long:
the more it rejects, the more it shapes what is measured, which no constant explains. The worst run
of docs/validation.md (5) was predicted within 12 % with 14 % rejected.
"""


def check_runs(fitted: Sequence[Observed], held_out: Sequence[Observed]) -> CalibrationSpec:
    """
    Return the calibration whose constants a fit to *fitted* multiplies.

    Step times of all runs, also of those held out, are simulated with its constants, which hold
    for one processor, engine, model and dtype alone: its key. Runs that are fitted to were also
    planned with it. The plan of a run held out may come from other constants, say those of an
    earlier refit: they are not used.

    Raises:
        InputError: a run without a calibration, of another key, or, to be fitted to, of another
            calibration, of a verdict that proves nothing, or with too many requests turned away.
    """
    base = _calibration(fitted[0])
    for run in (*fitted, *held_out):
        _check_key(run, base, fitted[0].name)
    for run in fitted:
        found = _calibration(run)
        if found != base:
            raise InputError(
                f"{run.name}: the plan's calibration",
                f"{found.name} of {found.date}",
                f"that of {fitted[0].name}, {base.name} of {base.date}: a fit starts from one"
                " calibration",
                "compare with this run by --hold-out, or fit to each alone",
            )
        _check_sound(run)
    return base


def _calibration(run: Observed) -> CalibrationSpec:
    found = run.calibration
    if found is None:
        raise InputError(
            f"{run.name}: the plan's calibration",
            None,
            "a plan made with --calibration",
            "time the engine first: `sizing calibrate SCENARIO --engine`",
        )
    return found


def _check_key(run: Observed, base: CalibrationSpec, name: str) -> None:
    """Refuse a run on another machine, or of another engine or model."""
    expected = asdict(base.key)
    for part, value in asdict(_calibration(run).key).items():
        if value != expected[part]:
            raise InputError(
                f"{run.name}: the plan's calibration: key.{part}",
                value,
                f"{expected[part]}, as {name} has it",
                "runs of one machine, engine and model",
            )


def _check_sound(run: Observed) -> None:
    if run.verdict is not None and run.verdict not in SOUND:
        raise InputError(
            f"{run.name}: verdict",
            run.verdict,
            f"one of {', '.join(SOUND)}: this run was not fit to measure",
            "load again, or compare with it only by --hold-out",
        )
    sent = run.turned_away + len(run.arrivals)
    if run.turned_away > MOST_TURNED_AWAY * sent:
        raise InputError(
            f"{run.name}: requests turned away",
            f"{run.turned_away:,} of {sent:,}",
            f"at most {MOST_TURNED_AWAY:.0%}: the simulation admits every request",
            "load again at a lower rate",
        )
