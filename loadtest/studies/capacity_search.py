"""The highest request rate that meets the SLO: runs at different rates, kept in `search.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loadtest.run.folder import as_json
from loadtest.verdict.verdict import HOLDS, Verdict
from minicluster.config import parse, read_json
from minicluster.errors import Inconclusive, InputError, TargetFailed
from minicluster.files import write_atomically
from minicluster.stats.shares import LEVELS, samples_needed
from minicluster.workload.sample_size import MARGIN, default_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from minicluster.plan import Plan

    Measure = Callable[[float, int, str], Verdict]

SCHEMA_VERSION = 1
STATE = "search.json"
EXTENSION = 2.0  # factor by which an undecided probe without an estimate of its own is extended
MAX_EXTENSION = 4.0  # largest factor of one extension: the estimate of a short run is uncertain

GROWTH = 1.25
"""Ratio of consecutive rates while all probes hold or all miss: three steps double the rate."""

MAX_RATIO = 16.0
"""Largest ratio to the first rate, in either direction; beyond it the plan is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """
    One run of the search at one request rate.

    Attributes:
        holds: whether the SLO held; `None`: no run of the allowed length decides.
        attained_fraction: lowest attained fraction of all limits.
    """

    requests_per_s: float
    num_requests: int
    verdict: str
    holds: bool | None
    attained_fraction: float
    good_requests_per_s: float
    ttft_s: float | None
    tpot_s: float | None
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityBracket:
    """
    The bracket of the highest request rate that meets the SLO.

    Attributes:
        low: highest rate that held, below every rate that missed; `None`: none held.
        high: lowest rate that missed; `None`: none missed.
        unclear: rates between both, ascending, at which no run of the allowed length decides.
    """

    low: float | None
    high: float | None
    unclear: tuple[float, ...]

    @property
    def middle(self) -> float | None:
        """The geometric mean of both ends, in requests/s; `None` if one is unknown."""
        if self.low is None or self.high is None:
            return None
        return math.sqrt(self.low * self.high)

    def within(self, resolution_fraction: float) -> bool:
        """Return whether both ends are known and at most the resolution apart."""
        if self.low is None or self.high is None:
            return False
        return self.high <= self.low * (1 + resolution_fraction)


def next_rate(probes: Sequence[Probe], *, first: float, resolution_fraction: float) -> float | None:
    """
    Return the next rate to probe; `None`: the bracket is narrow enough, or cannot get narrower.

    Steps of 25 % until one rate holds and one misses, then bisection in the geometric mean until
    both are at most the resolution apart. Undecided probes between them are near the limit: the
    gaps below and above are then halved, the wider one first, until each is half the resolution.
    """
    if not probes:
        return first
    bracket = capacity(probes)
    rates = [rate for rate in (bracket.low, *bracket.unclear, bracket.high) if rate is not None]
    if bracket.low is None:
        lower = rates[0] / GROWTH
        return lower if lower > first / MAX_RATIO else None
    if bracket.high is None:
        higher = rates[-1] * GROWTH
        return higher if higher < first * MAX_RATIO else None
    if bracket.within(resolution_fraction):
        return None
    start, end = max((rates[:2], rates[-2:]), key=lambda gap: gap[1] / gap[0])
    return math.sqrt(start * end) if end > start * math.sqrt(1 + resolution_fraction) else None


def capacity(probes: Sequence[Probe]) -> CapacityBracket:
    """
    Return the bracket that *probes* support.

    A rate that held above a rate that missed does not count: the lower miss does.
    """
    high = min((p.requests_per_s for p in probes if p.holds is False), default=None)
    below = [p for p in probes if high is None or p.requests_per_s < high]
    low = max((p.requests_per_s for p in below if p.holds), default=None)
    unclear = {p.requests_per_s for p in below if p.holds is None}
    between = (rate for rate in unclear if low is None or rate > low)
    return CapacityBracket(low=low, high=high, unclear=tuple(sorted(between)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySearch:
    """
    The state of a search; `search.json` contains exactly this.

    Attributes:
        inputs_hash: identifies the plan; the search of another plan is not resumed.
        resolution_fraction: allowed distance of the lowest rate that misses from the highest that
            holds, as a fraction of the latter.
        predicted_requests_per_s: highest rate at which the plan predicts the SLO to hold.
        saturation_requests_per_s: rate at which a pool of the plan is fully utilised.
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
    def found(self) -> CapacityBracket:
        """The bracket that the probes so far support."""
        return capacity(self.probes)

    @property
    def error_fraction(self) -> float | None:
        """Predicted / measured - 1, with the middle of the bracket as the measured limit."""
        middle = self.found.middle
        return None if middle is None else self.predicted_requests_per_s / middle - 1


def new_search(
    plan: Plan, host: str, *, first: float | None, resolution_fraction: float, most_requests: int
) -> CapacitySearch:
    """
    Return a search without probes; by default it begins at 0.8 of the predicted limit.

    Raises InputError: a number out of range, or too few requests to prove anything.
    """
    predicted = plan.headroom.load_factor * plan.workload.requests_per_s
    start = 0.8 * predicted if first is None else first
    needed = samples_needed(LEVELS[plan.slo.percentile])
    if not 0 < start < float("inf"):
        raise InputError("--first", start, "more than 0 requests/s")
    if not 0.01 <= resolution_fraction <= 1:  # noqa: PLR2004
        raise InputError("--resolution", resolution_fraction, "from 0.01 to 1")
    if most_requests < needed:
        expectation = f"at least {needed}, the fewest that prove a {plan.slo.percentile}"
        raise InputError("--most-requests", most_requests, expectation)
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


def resume_search(new: CapacitySearch, folder: Path) -> CapacitySearch:
    """
    Return *new* with the probes of the same search in *folder*; *new* itself if there is none.

    The resumed search may have a larger `most_requests` than it began with.

    Raises InputError: *folder* contains another search, or a file that is none.
    """
    path = folder / STATE
    if not path.exists():
        return new
    before = parse(CapacitySearch, read_json(path, "a search of this version"), place=str(path))
    most_requests = max(before.most_requests, new.most_requests)
    if replace(before, most_requests=most_requests, probes=()) != new:
        expectation = "the same plan, host and options (--most-requests may be larger)"
        raise InputError(str(path), "another search", expectation, "or another -o folder")
    return replace(new, probes=before.probes)


def run_search(search: CapacitySearch, measure: Measure, folder: Path) -> CapacitySearch:
    """
    Probe rates until the limit is known, or no run of the allowed length narrows it further.

    The state is written into *folder* after each probe; *measure* makes a run of (requests/s,
    number of requests, name of its folder).

    Raises:
        Inconclusive: a probe was invalid, and says nothing about the endpoint.
        TargetFailed: the endpoint failed.
    """
    while (following := _next_probe(search)) is not None:
        place, rate, num = following
        probe = _probe_rate(measure, rate, num, search.most_requests, f"try-{place + 1}")
        probes = (*search.probes[:place], probe, *search.probes[place + 1 :])
        search = replace(search, probes=probes)
        write_atomically(folder / STATE, as_json(search))
    return search


def _next_probe(search: CapacitySearch) -> tuple[int, float, int] | None:
    """
    Return place, rate and number of requests of the next probe; `None`: there is none.

    An undecided probe of a search resumed with a larger `most_requests` is repeated.
    """
    for place, probe in enumerate(search.probes):
        rate, num = probe.requests_per_s, probe.num_requests
        if rate in search.found.unclear and num < search.most_requests:
            return place, rate, min(search.most_requests, round(EXTENSION * num))
    following = next_rate(
        search.probes,
        first=search.first_requests_per_s,
        resolution_fraction=search.resolution_fraction,
    )
    if following is None:
        return None
    num = min(search.most_requests, default_requests(search.percentile))
    return len(search.probes), following, num


def _probe_rate(measure: Measure, rate: float, num: int, most: int, name: str) -> Probe:
    """Probe *rate*; while the run is inconclusive, repeat it with more requests, up to *most*."""
    while True:
        verdict = measure(rate, num, name)
        reasons = "; ".join(verdict.reasons)
        if verdict.verdict == "interrupted":
            raise KeyboardInterrupt
        if verdict.verdict == "invalid":
            raise Inconclusive(f"{name} was invalid: {reasons} (the same command repeats it)")
        if verdict.verdict == "failed":
            raise TargetFailed(reasons)
        if verdict.verdict != "inconclusive" or num >= most:
            return _probe_of(rate, num, name, verdict)
        num = min(most, _extended(num, verdict))


def _extended(num: int, verdict: Verdict) -> int:
    """Return the number of requests that the undecided limits need, by the run with *num*."""
    unclear = [p for p in verdict.slo if p.verdict == "inconclusive"]
    # Some of those sent were cut as warm-up.
    needed = [(p.num_needed or 0) * num / max(1, p.num_requests) for p in unclear]
    if not verdict.window.settled or not all(needed):
        needed.append(EXTENSION / MARGIN * num)
    return round(min(max(MARGIN * max(needed, default=num), MARGIN * num), MAX_EXTENSION * num))


def _probe_of(rate: float, num: int, name: str, verdict: Verdict) -> Probe:
    measured = {result.metric: result.measured_s for result in verdict.slo}
    return Probe(
        requests_per_s=rate,
        num_requests=num,
        verdict=verdict.verdict,
        holds=HOLDS.get(verdict.verdict),
        attained_fraction=min(result.attained_fraction for result in verdict.slo),
        good_requests_per_s=verdict.throughput.good_requests_per_s,
        ttft_s=measured.get("ttft"),
        tpot_s=measured.get("tpot"),
        folder=name,
    )
