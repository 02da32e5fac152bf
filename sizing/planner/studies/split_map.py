"""Where splitting pays: GPUs of the best split against the best aggregated pools over two axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from minicluster.errors import InputError
from minicluster.pages.shown import Shown
from minicluster.workload.arrivals import equally_likely
from sizing import catalog
from sizing.planner.bounds import QUANTILES
from sizing.planner.configuration import cost, cost_of, with_search
from sizing.planner.error_model import step_errors
from sizing.planner.plan import at_planned_rate, sharing_classes
from sizing.planner.pool_sizing import sized_again
from sizing.planner.search import NO_LIMIT, LayoutSearch
from sizing.planner.studies.changes import link_bytes_per_s, with_lengths, with_links
from sizing.planner.studies.grid import MAX_POINTS, Swept
from sizing.planner.workers import NO_WORKERS, Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.plan import Inputs
    from sizing.planner.simulated_check import Found

RATIO, LINK = "prompt_answer_ratio", "link_bytes_per_s"
DEFAULT_X = Swept(key=RATIO, values=("0.5", "1", "2", "4", "8", "16", "32", "64"))
LINKS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Multiples of the scenario's link that the default second axis has."""

MOST = 2.0
"""Multiple of the cost of aggregated pools up to which split ones are sized."""

UNSIZED = "not sized: interrupted"
"""Reason of a point that the map was stopped before."""

MIDDLE, SURE = 0.5, 0.9
"""Confidences between which the spread of the GPUs needed is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPoint:
    """
    Both kinds of pools at one point.

    `None` where a kind does not hold the SLO, or where split pools cost `MOST` times as much as
    aggregated ones, or more.

    Attributes:
        x, y: values of the axes, as they were given.
        split_cost, mixed_cost: in the unit of search.objective.
        split_layout, mixed_layout: as options of `sizing predict`.
        confidence_fraction: chance that the sign of the difference is right; `None` where one of
            them is missing.
        reason: why there is neither.
    """

    x: str
    y: str
    split_gpus: int | None = None
    mixed_gpus: int | None = None
    split_cost: float | None = None
    mixed_cost: float | None = None
    split_layout: str = ""
    mixed_layout: str = ""
    confidence_fraction: float | None = None
    reason: str = ""

    @property
    def saved_fraction(self) -> float | None:
        """Share of the larger cost that splitting saves; negative where it costs more."""
        if self.split_cost is None or self.mixed_cost is None:
            return None
        more = max(self.split_cost, self.mixed_cost)
        return (self.mixed_cost - self.split_cost) / more


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMap(Shown):
    """
    A map; points in the order of y, then x.

    Attributes:
        objective: gpus, usd or watts: what is compared.
        classes: of requests, which share the pools at every point; 0: the load has none.
        interrupted: whether it was stopped; points that were not sized say so as their reason.
    """

    x: Swept
    y: Swept
    objective: str
    points: tuple[SplitPoint, ...]
    classes: int
    interrupted: bool


def split_map(
    inputs: Inputs,
    x: Swept | None = None,
    y: Swept | None = None,
    *,
    workers: Workers = NO_WORKERS,
    progress: Callable[[int, int], None] | None = None,
) -> SplitMap:
    """
    Compare the best split with the best aggregated pools at every pair of values of two axes.

    Sizes are those of the quick runs of `sizing plan`, within about 5 %; it verifies what it takes
    with long ones. The confidence is that of two needs with lognormal errors:

        P = Phi(|ln(m / s)| / sqrt(var_s + var_m)),
        var = (ln(g(c) / g(0.5)) / z(c))^2 + (r / g)^2 / 12      (docs/model.md, eq. E4)

    g(c): cost of what a kind needs at confidence c; r: cost of its last replica, because needs
    are rounded up to whole replicas.

    Args:
        x: a scenario key and its values, or `prompt_answer_ratio` (prompts and answers together
            as long as the scenario's), or `link_bytes_per_s`; absent: the ratio.
        y: likewise; absent: the link.
        workers: processes that size; they do not change the map.
        progress: is told how many points are done, and of how many.

    Raises:
        NoPlan: no plan says the rate of a load of users.
        InputError: an impossible axis, or a scenario that no point of can be planned.
        KeyboardInterrupt: Ctrl-C before the first point; after it the map so far is returned.

    Ignores:
        That the errors of both kinds have common causes: taken as independent, the confidence is
        rather too low.
    """
    classes = sharing_classes(inputs, "sizing split-map")
    x, y = x or DEFAULT_X, y or _links(inputs)
    _check_axes(x, y)
    inputs = at_planned_rate(with_search(inputs, pools="any"))
    asked = {pair: _changed(inputs, x, y, pair) for pair in product(y.values, x.values)}
    if all(isinstance(each, InputError) for each in asked.values()):
        raise next(each for each in asked.values() if isinstance(each, InputError))
    points = {(at_y, at_x): SplitPoint(x=at_x, y=at_y, reason=UNSIZED) for at_y, at_x in asked}
    link = next((at for at, axis in enumerate((y, x)) if axis.key == LINK), None)
    interrupted, done = False, 0
    try:
        for sized in workers.map(_sized, _lines(asked, link)):
            points |= sized
            done += len(sized)
            if progress is not None:
                progress(done, len(asked))
    except KeyboardInterrupt:
        interrupted = True
        if all(each.reason == UNSIZED for each in points.values()):
            raise
    return SplitMap(
        x=x,
        y=y,
        objective=inputs.scenario.search.objective,
        classes=classes,
        points=tuple(points.values()),
        interrupted=interrupted,
    )


def _check_axes(x: Swept, y: Swept) -> None:
    for option, axis in (("--x", x), ("--y", y)):
        if axis.key.endswith((".users", ".think_s")):
            expected = "another key, such as workload.requests_per_s: both kinds have one rate"
            raise InputError(option, axis.key, expected, "`sizing capacity` says how many users")
    if x.key == y.key:
        raise InputError("--y", y.key, "another key than that of --x")
    for option, axis in (("--x", x), ("--y", y)):
        if len(set(axis.values)) < len(axis.values):
            raise InputError(f"{option} {axis.key}", ", ".join(axis.values), "each value once")
    total = len(x.values) * len(y.values)
    if total > MAX_POINTS:
        raise InputError("--x, --y", f"{total:,} points", f"at most {MAX_POINTS:,}")


def _links(inputs: Inputs) -> Swept:
    link = link_bytes_per_s(inputs)
    if link is None:
        raise InputError("--y", None, "an axis: the scenario's GPUs have no network", "--y KEY=V,V")
    return Swept(key=LINK, values=tuple(f"{link * factor:.3g}" for factor in LINKS))


def _changed(inputs: Inputs, x: Swept, y: Swept, pair: tuple[str, str]) -> Inputs | InputError:
    values = {"--x": (x.key, pair[1]), "--y": (y.key, pair[0])}
    keys = [f"{key}={value}" for key, value in values.values() if key not in {RATIO, LINK}]
    place = " ".join(f"{option} {key}={value}" for option, (key, value) in values.items())
    try:
        found = catalog.with_keys(inputs, keys, place) if keys else inputs
        for option, (key, value) in values.items():
            if key == RATIO:
                found = _with_ratio(found, _positive(value, f"{option} {key}"))
            elif key == LINK:
                found = _with_link(found, _positive(value, f"{option} {key}"), option)
    except InputError as error:
        return error
    return found


def _positive(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise InputError(place, text, "a number above 0")
    return value


def _with_link(inputs: Inputs, bytes_per_s: float, place: str) -> Inputs:
    link = link_bytes_per_s(inputs)
    if link is None:
        raise InputError(place, LINK, "another axis: the scenario's GPUs have no network")
    return with_links(inputs, bytes_per_s / link)


def _with_ratio(inputs: Inputs, ratio: float) -> Inputs:
    """Return prompts *ratio* times as long as answers, together as long as before."""
    prompts, answers, _ = equally_likely(inputs.scenario.workload, QUANTILES)
    prompt, answer = float(prompts.mean()), float(answers.mean())
    shorter = (prompt + answer) / (1 + ratio)
    return with_lengths(inputs, prompts=ratio * shorter / prompt, answers=shorter / answer)


class _MapLine(NamedTuple):
    """
    Points that are sized one after the other, from the fastest link on.

    On a slower link split pools are never cheaper: those of the faster link are taken as they are
    where they still hold, and none are looked for where there were none.
    """

    points: dict[tuple[str, str], Inputs | InputError]
    along_link: bool


def _lines(asked: dict[tuple[str, str], Inputs | InputError], link: int | None) -> list[_MapLine]:
    """
    Divide pairs of values (y, x) into lines that are sized apart.

    Args:
        link: where in a pair the link stands; `None`: it is no axis.
    """
    across = 0 if link == 1 else 1
    lines: dict[str, dict[tuple[str, str], Inputs | InputError]] = {}
    for pair in asked if link is None else sorted(asked, key=lambda pair: -_number(pair[link])):
        lines.setdefault(pair[across], {})[pair] = asked[pair]
    return [_MapLine(points, along_link=link is not None) for points in lines.values()]


def _sized(line: _MapLine) -> dict[tuple[str, str], SplitPoint]:
    pools = _LinePools(along_link=line.along_link)
    return {
        pair: pools.compared(inputs, SplitPoint(x=pair[1], y=pair[0]))
        for pair, inputs in line.points.items()
    }


class _LinePools:
    """Sizes of both kinds on one line, kept for the points where they are the same, or nearly."""

    def __init__(self, *, along_link: bool) -> None:
        self.along_link = along_link
        self.mixed: dict[object, tuple[Found | None, float]] = {}
        self.sized = False
        self.split: Found | None = None

    def compared(self, inputs: Inputs | InputError, point: SplitPoint) -> SplitPoint:
        """Size both kinds at the next point; equal aggregated pools only once."""
        if isinstance(inputs, InputError):
            return replace(point, reason=str(inputs))
        try:
            search = LayoutSearch(inputs)
        except InputError as error:
            return replace(point, reason=str(error))
        key = _mixed_key(inputs, search)
        if key not in self.mixed:
            found = search.quick_mixed()
            self.mixed[key] = found, 0.0 if found is None else _variance(inputs, search, found)
        mixed, mixed_variance = self.mixed[key]
        below = NO_LIMIT if mixed is None else MOST * cost(inputs, mixed.configuration)
        split = self._split(search, below)
        if split is None and mixed is None:
            return replace(point, reason="no pools hold the SLO in quick runs")
        if mixed is not None:
            point = replace(
                point,
                mixed_gpus=mixed.configuration.gpus,
                mixed_cost=cost(inputs, mixed.configuration),
                mixed_layout=str(mixed.configuration),
            )
        if split is None:
            return point
        point = replace(
            point,
            split_gpus=split.configuration.gpus,
            split_cost=cost(inputs, split.configuration),
            split_layout=str(split.configuration),
        )
        if point.split_cost is None or point.mixed_cost is None:
            return point
        variance = mixed_variance + _variance(inputs, search, split)
        sure = sign_confidence(point.split_cost, point.mixed_cost, variance)
        return replace(point, confidence_fraction=sure)

    def _split(self, search: LayoutSearch, below: float) -> Found | None:
        """Size split pools, from those of the point before on."""
        if self.split is None and self.sized and self.along_link:
            return None
        near = None if self.split is None else self.split.configuration
        lowest = 0.0 if near is None or not self.along_link else cost(search.inputs, near)
        split = search.quick_split(near, below, least=lowest)
        if split is not None or self.along_link:
            self.split, self.sized = split, True
        return split


def _number(text: str) -> float:
    """Return a number; text that is none comes last, and its point says why."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _mixed_key(inputs: Inputs, search: LayoutSearch) -> object:
    """Return all that aggregated pools depend on: no link, unless a replica crosses it."""
    steps = []
    for each in search.candidates.mixed:
        load = search.models.load(each)
        path = replace(load.step_model.path, transfer_base_s=0.0, transfer_per_token_s=0.0)
        model = replace(load.step_model, path=path)
        steps.append((each, model, load.prefill, load.decode, load.tokens_per_step))
    scenario = inputs.scenario
    return scenario.workload, scenario.slo, repr(scenario.search), search.errors, tuple(steps)


def sign_confidence(one: float, other: float, variance: float) -> float:
    """
    Return the chance that the lesser of two estimates is the lesser in truth (eq. E4).

    Args:
        one, other: estimates whose errors are lognormal; the order does not matter.
        variance: of the logarithm of their ratio.
    """
    apart = abs(math.log(one / other))
    if not variance:
        return 1.0 if apart else 0.5
    return NormalDist().cdf(apart / math.sqrt(variance))


def _variance(inputs: Inputs, search: LayoutSearch, found: Found) -> float:
    """Return the variance of the logarithm of what a layout needs to cost."""
    here = inputs.scenario.search.confidence_fraction
    there = SURE if here < (MIDDLE + SURE) / 2 else MIDDLE
    other = sized_again(search.simulations, found, step_errors(inputs, there))
    cost_here = cost(inputs, found.configuration)
    rounding = max(cost_of(inputs, shape) for shape in found.configuration.layout.shapes.values())
    variance = (rounding / cost_here) ** 2 / 12
    if other is not None and inputs.calibration is None:
        quantiles = abs(NormalDist().inv_cdf(here) - NormalDist().inv_cdf(there))
        variance += (math.log(cost_here / cost(inputs, other)) / quantiles) ** 2
    return variance
