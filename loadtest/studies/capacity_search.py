"""Tries at rising and falling load until the limit is known; resumable from `search.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from loadtest.studies.capacity import Capacity, Probe, capacity, next_rate
from minicluster.errors import Inconclusive, InputError, TargetFailed
from minicluster.files import write_atomically
from minicluster.stats.confidence import samples_needed
from minicluster.stats.quantiles import LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loadtest.verdict.verdict import Verdict
    from minicluster.plan import Plan

    Measure = Callable[[float, int, str], Verdict]

SCHEMA_VERSION = 1
STATE = "search.json"
LONGER = 2.0
MOST_LONGER = 4.0
"""What a short run says it lacks is unsure."""
SPARE = 1.2
"""More than the fewest requests that could prove the limit kept: some will miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySearch:
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
        """Where the limit lies, as far as the tries so far say."""
        return capacity(self.probes)

    @property
    def error_fraction(self) -> float | None:
        """Predicted / measured - 1, where the middle of the bracket stands for the measured."""
        middle = self.found.middle
        return None if middle is None else self.predicted_requests_per_s / middle - 1


def enough_requests(percentile: str) -> int:
    """Return five times the fewest requests that can prove a percentile kept."""
    return 5 * samples_needed(LEVELS[percentile])


def begin(
    plan: Plan, host: str, *, first: float | None, resolution_fraction: float, most_requests: int
) -> CapacitySearch:
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
    return CapacitySearch(
        host=host,
        inputs_hash=plan.provenance.inputs_hash,
        percentile=plan.slo.percentile,
        first_requests_per_s=start,
        resolution_fraction=resolution_fraction,
        most_requests=most_requests,
        predicted_requests_per_s=predicted,
        saturation_requests_per_s=plan.prediction.capacity_requests_per_s,
    )


def resumed(fresh: CapacitySearch, folder: Path) -> CapacitySearch:
    """
    Return the search in *folder* if it is the same as *fresh* but for its tries, else *fresh*.

    It may go on with a larger `most_requests` than it began with.

    Raises:
        InputError: another search lies there, or a file that is none.
    """
    path = folder / STATE
    if not path.exists():
        return fresh
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        probes = tuple(Probe(**probe) for probe in raw.pop("probes"))
        before = CapacitySearch(**raw)
        fewer = before.most_requests < fresh.most_requests
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(str(path), f"{error}"[:80], "a search of this version") from None
    if (replace(before, most_requests=fresh.most_requests) if fewer else before) != fresh:
        raise InputError(
            str(path),
            "another search",
            "the same plan, host and options (--most-requests may be larger)",
            "or another -o folder",
        )
    # An invalid try ends a search now; it used to be kept, as the last, though it proves nothing.
    return replace(fresh, probes=tuple(p for p in probes if p.verdict != "invalid"))


def go_on(search: CapacitySearch, measure: Measure, folder: Path) -> CapacitySearch:
    """
    Try until the limit is known, or no run of the length allowed tells more of it.

    The state is written after each try.

    Args:
        search: as far as it is.
        measure: from requests/s, how many, and the name of a folder to a verdict.
        folder: of the state.

    Raises:
        Inconclusive: a try was invalid: whatever it shows, it says nothing of the endpoint.
        TargetFailed: the endpoint did.
    """
    while (order := _next(search)) is not None:
        place, rate, num = order
        probe = _tried(measure, rate, num, search.most_requests, f"try-{place + 1}")
        tries = (*search.probes[:place], probe, *search.probes[place + 1 :])
        search = replace(search, probes=tries)
        write_atomically(folder / STATE, to_json(search))
    return search


def to_json(search: CapacitySearch) -> str:
    """Write *search* as JSON."""
    return json.dumps(asdict(search), indent=2, allow_nan=False) + "\n"


def _next(search: CapacitySearch) -> tuple[int, float, int] | None:
    """
    Return the place of the next try, its rate and how many requests; `None`: there is none.

    A try that told nothing, of a search resumed with a larger `most_requests`, is made again.
    """
    for place, probe in enumerate(search.probes):
        rate, num = probe.requests_per_s, probe.num_requests
        if rate in search.found.unclear and num < search.most_requests:
            return place, rate, min(search.most_requests, round(LONGER * num))
    following = next_rate(
        search.probes,
        first=search.first_requests_per_s,
        resolution_fraction=search.resolution_fraction,
    )
    if following is None:
        return None
    enough = round(SPARE * samples_needed(LEVELS[search.percentile]))
    return len(search.probes), following, min(search.most_requests, enough)


def _tried(measure: Measure, rate: float, num: int, most: int, name: str) -> Probe:
    """Try *rate*; while a try is inconclusive, again with more requests, up to *most*."""
    while True:
        verdict = measure(rate, num, name)
        if verdict.verdict in {"invalid", "failed", "interrupted"}:
            raise _stopped(verdict, name)
        if verdict.verdict != "inconclusive" or num >= most:
            return _probe(rate, num, name, verdict)
        num = min(most, _longer(num, verdict))


def _longer(num: int, verdict: Verdict) -> int:
    """Return how many requests the limits lack that *num* left open, or twice as many."""
    unclear = [p for p in verdict.promises if p.verdict == "open"]
    # Of those sent, some were cut as warm-up.
    needed = [(p.num_needed or 0) * num / max(1, p.num_requests) for p in unclear]
    if not verdict.window.settled or not all(needed):
        needed.append(LONGER / SPARE * num)
    return round(min(max(SPARE * max(needed, default=num), SPARE * num), MOST_LONGER * num))


def _stopped(verdict: Verdict, name: str) -> BaseException:
    reasons = "; ".join(verdict.reasons)
    if verdict.verdict == "interrupted":
        return KeyboardInterrupt()
    if verdict.verdict == "invalid":
        return Inconclusive(f"{name} was invalid: {reasons} (the same command makes it again)")
    return TargetFailed(reasons)


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
