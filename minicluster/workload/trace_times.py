"""When the requests of a trace came: the unit of its times, by what the file says and holds."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from minicluster.errors import Fault, InputError
from minicluster.workload.trace_formats import meaning
from minicluster.workload.trace_options import UNITS_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.workload.schedule import ScheduledRequest
    from minicluster.workload.trace_formats import Format

Key = tuple[str, str]
"""Ids of a trace and of a span."""


class Request(NamedTuple):
    """
    A request as its line has it.

    Attributes:
        place: file and line.
        row: all but its time, and the content that `ids` name.
        key, at: its time, a number or a text, and the key that it stands under.
        took_s: from its arrival to `at`.
        ids: of the blocks of its prompt.
        span: its ids, if it is one.
    """

    place: str
    row: ScheduledRequest
    key: str
    at: object
    took_s: float
    ids: tuple[int, ...]
    span: Key | None

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompt, and of the answer."""
        return self.row.input_tokens, self.row.output_tokens


LOAD_PER_S = (10 / 3600, 100.0)
"""Mean rates between which a load lies; outside, its times likely have another unit."""
POSSIBLE_PER_S = (1 / 3600, 200.0)
"""Mean rates that a load may have: without a format, a second unit with one leaves a doubt."""
DAY_S = 86_400.0
EPOCH_S = tuple(datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (2015, 2035))
"""Times since 1970 of requests to language models; those of two units never overlap."""
LONGEST_S = 3650 * DAY_S  # no trace is longer: a larger time does not count from its begin
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
GIVE_UNIT = "give --time-unit s, ms, us or ns"


class Clock(NamedTuple):
    """
    How a file counts time.

    Attributes:
        unit: of numbers; `None`: times are dates.
        since_1970: whether numbers count from then.
        how: what decided it, for the reader, if it was not the file's own word.
        by_key: whether keys say the unit.
    """

    unit: str | None
    since_1970: bool = False
    how: str = ""
    by_key: bool = False

    def __str__(self) -> str:
        """Say the unit."""
        if self.unit is None:
            return "dates"
        return WORDS[self.unit] + " since 1970" * self.since_1970 + self.how

    def due_s(self, request: Request) -> float:
        """Return the arrival of a request in seconds; refuse a time of another kind."""
        number = number_of(request.at)
        alike = (self.unit is None) == (number is None)
        if number is not None and self.since_1970:
            alike = epoch_unit(number) == self.unit
        if not alike or (self.by_key and _unit(request) != self.unit):
            kind = "a date and time" if self.unit is None else f"a number, {self}"
            raise InputError(request.place, _said(request), f"{kind}, as the times before")
        if number is None or self.unit is None:
            return _moment_s(request) - request.took_s
        if not isfinite(number):
            raise InputError(request.place, _said(request), "a finite time")
        return number * UNITS_S[self.unit] - request.took_s


def clock_of(
    requests: Sequence[Request], form: Format, option: str | None, *, fits_blocks: bool | None
) -> Clock:
    """
    Return how a file counts time: as the option, its keys, the calendar, or format and rate say.

    *fits_blocks* says whether ids of blocks are those of the format; `None`: there are none.

    Raises InputError: times that can be read in two ways, which it names.
    """
    first = requests[0]
    number = number_of(first.at)
    if number is None:
        if option:
            expected = f"no such option: times are dates, such as {first.at}"
            raise InputError("--time-unit", option, expected)
        return Clock(None)
    by_key, since = _unit(first), epoch_unit(number)
    if option:
        is_long = since != option and number * UNITS_S[option] > LONGEST_S
        if is_long or by_key not in {None, option}:
            expected = f"a unit that fits {first.key}, such as {first.at}"
            raise InputError("--time-unit", option, expected)
        return Clock(option)
    stated = by_key or form.time_unit
    if since is None:
        return Clock(by_key, by_key=True) if by_key else _by_rate(requests, form, fits_blocks)
    if stated in {None, since} or (not by_key and number * UNITS_S[stated] > LONGEST_S):
        return Clock(since, since_1970=True)
    day = datetime.fromtimestamp(number * UNITS_S[since], UTC).date()
    raise InputError(
        f"{first.place}: {first.key}",
        f"{number}, {number * UNITS_S[stated] / DAY_S:,.1f} days in {WORDS[stated]},"
        f" or {day} in {WORDS[since]} since 1970",
        "times that can be read in one way",
        GIVE_UNIT,
    )


def _by_rate(requests: Sequence[Request], form: Format, fits_blocks: bool | None) -> Clock:  # noqa: FBT001
    """
    Return the unit in which times come at the rate of a load.

    A format's unit is right if ids fit its blocks, or without ids if its keys are no other's;
    otherwise a load may have the rate in no other unit, and in a log times must ascend, too, and
    be none since 1970 nor longer than a trace is.
    """
    numbers = [number for request in requests if (number := number_of(request.at)) is not None]
    span = max(numbers) - min(numbers)
    if not span:
        return Clock(form.time_unit or "s", how=", all alike" if len(numbers) > 1 else "")
    # A format leaves less doubt: some write its seconds as milliseconds, or the other way round.
    units, (low, high) = (("s", "ms"), LOAD_PER_S) if form.time_unit else (UNITS_S, POSSIBLE_PER_S)
    rates = {unit: (len(numbers) - 1) / span / UNITS_S[unit] for unit in units}
    possible = [unit for unit, rate in rates.items() if low <= rate <= high]
    certain = form.sure if fits_blocks is None else fits_blocks
    unit = form.time_unit or (possible or ["s"])[0]
    sole = possible == [unit]
    if LOAD_PER_S[0] <= rates[unit] <= LOAD_PER_S[1] and (sole or (certain and form.time_unit)):
        if form.time_unit:
            return Clock(unit)
        is_count = numbers == sorted(numbers) and not any(map(epoch_unit, numbers))
        if is_count and numbers[-1] * UNITS_S[unit] <= LONGEST_S:
            return Clock(unit, how=", the only unit in which the rate is that of a load")
    readings = "; as ".join(
        f"{WORDS[unit]} {rate:,.4g} requests/s over {span * UNITS_S[unit]:,.4g} s"
        for unit, rate in rates.items()
        if unit in {"s", "ms", *possible}
    )
    expected = "times whose unit the file leaves no doubt of"
    place = requests[0].place.rpartition(":")[0]
    raise InputError(f"{place}: times", Fault(f"are numbers: as {readings}"), expected, GIVE_UNIT)


def epoch_unit(number: float) -> str | None:
    """Return the unit in which a number is a time since 1970 in `EPOCH_S`."""
    low, high = EPOCH_S
    return next((unit for unit, s in UNITS_S.items() if low <= number * s <= high), None)


def number_of(at: object) -> float | None:
    """Return a time that is a number, also one written as a text; `None`: it is none."""
    if isinstance(at, bool) or not isinstance(at, int | float | str):
        return None
    try:
        return float(at) if isinstance(at, str) else at
    except ValueError:
        return None


def _unit(request: Request) -> str | None:
    means = meaning(request.key)
    return means.unit if means else None


def _said(request: Request) -> Fault:
    return Fault(f"is one whose {request.key} is {request.at}")


def _moment_s(request: Request) -> float:
    """Read a date and time as seconds; without a zone it is UTC, wherever we run."""
    text = str(request.at).strip().removesuffix(" UTC")
    try:
        moment = datetime.fromisoformat(text if len(text) > len("2026-01-01") else "no time")
    except ValueError:
        expected = "a number, or a date and time as ISO 8601 writes them"
        raise InputError(request.place, _said(request), expected) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
