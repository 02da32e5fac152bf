"""What sizing reads of a load test's `verdict.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """
    The verdict on a run.

    Attributes:
        verdict: `met`, `missed`, `inconclusive`, `invalid`, `failed` or `interrupted`.
        reasons: why, in sentences.
        start_s: scheduled arrivals count from here on, seconds after the start of the run.
    """

    verdict: str
    reasons: tuple[str, ...]
    start_s: float


def read_run_verdict(path: Path) -> RunVerdict | None:
    """
    Read a verdict; `None` if there is no such file.

    Raises InputError: the file holds no verdict.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return RunVerdict(
            verdict=str(found["verdict"]),
            reasons=tuple(map(str, found["reasons"])),
            start_s=float(found["window"]["start_s"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: verdict, reasons, window.start_s",
            f"{error}"[:80],
            "a verdict as `loadtest run` writes it",
            "`loadtest report` writes it anew",
        ) from None
