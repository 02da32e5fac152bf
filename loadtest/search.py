"""Tries at rising and falling load until the limit is known; resumable from `search.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from loadtest.capacity import Capacity, Probe, capacity, next_rate
from loadtest.confidence import samples_needed
from loadtest.run import write_whole
from loadtest.spread import LEVELS
from sizing.errors import InputError, TargetFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loadtest.verdict import Verdict
    from sizing.plan import Plan

    Measure = Callable[[float, int, str], Verdict]

SCHEMA_VERSION = 1
STATE = "search.json"
LONGER = 2.0
SPARE = 1.2
"""More than the fewest requests that could prove the limit kept: some will miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """
    A search as far as it is; `search.json` holds exactly this.

    Attributes:
        inputs_hash: of the plan; another plan's search is not gone on with.
        first_requests_per_s: tried first.
        resolution_fraction: how close the highest rate that holds and the lowest that misses are.
        most_requests: of one try.
        predicted_requests_per_s: up to which the plan has the SLO hold (its headroom).
        saturation_requests_per_s: at which the plan's pools are busy all the time.
    """

    schema_version: int = SCHEMA_VERSION
    host: str
    inputs_hash: str
    percentile: str
    first_requests_per_s: float
    resolution_fraction: float
    most_requests: int
    predicted_requests_per_s: float
    saturation_requests_per_s: float
    probes: tuple[Probe, ...] = ()

    @property
    def found(self) -> Capacity:
        """What the tries so far say."""
        return capacity(self.probes)

    @property
    def error_fraction(self) -> float | None:
        """Predicted / measured - 1."""
        measured = self.found.requests_per_s
        return None if measured is None else self.predicted_requests_per_s / measured - 1


def enough_requests(percentile: str) -> int:
    """Return five times the fewest requests that can prove a percentile kept."""
    return 5 * samples_needed(LEVELS[percentile])


def begin(
    plan: Plan, host: str, *, first: float | None, resolution_fraction: float, most_requests: int
) -> Search:
    """
    Return a search with nothing tried; it begins at 0.8 of what the plan has hold.

    Raises:
        InputError: a number without sense, or too few requests to prove anything.
    """
    predicted = plan.headroom.load_factor * plan.workload.requests_per_s
    start = 0.8 * predicted if first is None else first
    needed = samples_needed(LEVELS[plan.slo.percentile])
    if not 0 < start < float("inf"):
        raise InputError("--first", start, "more than 0 requests/s")
    if not 0.01 <= resolution_fraction <= 1:  # noqa: PLR2004
        raise InputError("--resolution", resolution_fraction, "from 0.01 to 1")
    if most_requests < needed:
        raise InputError(
            "--most-requests",
            most_requests,
            f"at least {needed}, without which no {plan.slo.percentile} is proven",
        )
    return Search(
        host=host,
        inputs_hash=plan.provenance.inputs_hash,
        percentile=plan.slo.percentile,
        first_requests_per_s=start,
        resolution_fraction=resolution_fraction,
        most_requests=most_requests,
        predicted_requests_per_s=predicted,
        saturation_requests_per_s=plan.prediction.capacity_requests_per_s,
    )


def resumed(fresh: Search, folder: Path) -> Search:
    """
    Return the search in *folder* if it is the same as *fresh* but for its tries, else *fresh*.

    Raises:
        InputError: another search lies there, or a file that is none.
    """
    path = folder / STATE
    if not path.exists():
        return fresh
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        probes = tuple(Probe(**probe) for probe in raw.pop("probes"))
        before = Search(**raw)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(str(path), f"{error}"[:80], "a search of this version") from None
    if replace(before, probes=()) != fresh:
        raise InputError(
            str(path), "another search", "the same plan, host and options", "or another -o folder"
        )
    return replace(fresh, probes=probes)


def go_on(search: Search, measure: Measure, folder: Path) -> Search:
    """
    Try until the limit is known; the state is written after each try.

    A try that proves nothing is made again with twice the requests, up to the most allowed.

    Args:
        search: as far as it is.
        measure: from requests/s, how many, and the name of a folder to a verdict.
        folder: of the state.

    Raises:
        TargetFailed: the endpoint did.
    """
    needed = samples_needed(LEVELS[search.percentile])
    while True:
        rate = next_rate(
            search.probes,
            first=search.first_requests_per_s,
            resolution_fraction=search.resolution_fraction,
        )
        if rate is None:
            return search
        num = min(search.most_requests, round(SPARE * needed))
        name = f"try-{len(search.probes) + 1}"
        while True:
            verdict = measure(rate, num, name)
            if verdict.verdict in {"failed", "interrupted"}:
                raise _stopped(verdict)
            if verdict.verdict in {"met", "missed"} or num >= search.most_requests:
                break
            num = min(search.most_requests, round(LONGER * num))
        search = replace(search, probes=(*search.probes, _probe(rate, num, name, verdict)))
        write_whole(folder / STATE, to_json(search))


def to_json(search: Search) -> str:
    """Write *search* as JSON."""
    return json.dumps(asdict(search), indent=2, allow_nan=False) + "\n"


def _stopped(verdict: Verdict) -> Exception:
    if verdict.verdict == "interrupted":
        return KeyboardInterrupt()  # type: ignore[return-value]
    return TargetFailed("; ".join(verdict.reasons))


def _probe(rate: float, num: int, name: str, verdict: Verdict) -> Probe:
    measured = {promise.metric: promise.measured_s for promise in verdict.promises}
    return Probe(
        requests_per_s=rate,
        num_requests=num,
        verdict=verdict.verdict,
        holds={"met": True, "missed": False}.get(verdict.verdict),
        attained_fraction=min(promise.attained_fraction for promise in verdict.promises),
        good_requests_per_s=verdict.throughput.good_requests_per_s,
        ttft_s=measured.get("ttft"),
        tpot_s=measured.get("tpot"),
        folder=name,
    )
