"""The profile of a day: the rate of requests by the time of day, from a CSV file."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from minicluster.errors import Fault, InputError
from minicluster.files import read_text

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

DAY_S = 86_400.0
SECONDS = {"time_s": 1.0, "hour": 3600.0}
"""Seconds of the unit of each column that may say the time."""

RATES = ("requests_per_s", "peak_fraction")
"""Columns that may say the rate: itself, or its share of the scenario's."""

COLUMNS = "time_s or hour, and requests_per_s or peak_fraction (of workload.requests_per_s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DayProfile:
    """A day's rates at evenly spaced times from 0 on, linear in between; the day repeats."""

    requests_per_s: tuple[float, ...]

    @property
    def peak_requests_per_s(self) -> float:
        """The highest rate of the day."""
        return max(self.requests_per_s)

    def at(self, time_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the rates at some times of day."""
        count = len(self.requests_per_s)
        times_s = np.arange(count) * (DAY_S / count)
        return np.asarray(np.interp(time_s, times_s, self.requests_per_s, period=DAY_S))


def read_profile(path: Path, requests_per_s: float) -> DayProfile:
    """
    Read a day: a CSV file with a row a time, evenly spaced from 0 on; lines with # are comments.

    Args:
        path: columns `time_s` or `hour`, and `requests_per_s` or `peak_fraction`.
        requests_per_s: of which `peak_fraction` is the share.

    Raises InputError: a file without these columns, no rate, or times that are unsorted,
    have a hole or make no day; the message names file and line.
    """
    lines = read_text(path, f"a CSV file: {COLUMNS}").splitlines()
    kept = [(at, line) for at, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    time, rate = _columns(path, kept)
    times: list[tuple[int, float]] = []
    rates: list[float] = []
    for number, line in kept[1:]:
        names, values = _values(kept[0][1]), _values(line)
        if len(values) != len(names):
            raise InputError(f"{path}:{number}", line[:80], f"two numbers: {COLUMNS}")
        pair = dict(zip(names, values, strict=True))
        times.append((number, SECONDS[time] * _number(f"{path}:{number}: {time}", pair[time])))
        rates.append(_number(f"{path}:{number}: {rate}", pair[rate]))
        if rate == "peak_fraction" and rates[-1] > 1:
            raise InputError(f"{path}:{number}: {rate}", rates[-1], "a share from 0 to 1")
    _check_times(path, times)
    factor = requests_per_s if rate == "peak_fraction" else 1.0
    if not max(rates) > 0:
        raise InputError(str(path), Fault("has no requests all day"), "at least one rate above 0")
    return DayProfile(requests_per_s=tuple(factor * value for value in rates))


def _columns(path: Path, kept: list[tuple[int, str]]) -> tuple[str, str]:
    place, text = (f"{path}:{kept[0][0]}", kept[0][1]) if kept else (str(path), "")
    names = _values(text)
    time = next((name for name in SECONDS if name in names), "")
    rate = next((name for name in RATES if name in names), "")
    if sorted(names) != sorted([time, rate]):
        raise InputError(place, text[:80] or "an empty file", f"the columns {COLUMNS}")
    return time, rate


def _values(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _number(place: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(place, text, "a number") from None
    if not (isfinite(value) and value >= 0):
        raise InputError(place, value, "a finite number, zero or more")
    return value


def _check_times(path: Path, times: list[tuple[int, float]]) -> None:
    if len(times) < 2:  # noqa: PLR2004  (two rows have a distance)
        raise InputError(str(path), f"{len(times)} rows", "two or more, evenly over 24 hours")
    gap_s = times[1][1] - times[0][1]
    before_s = -gap_s
    for number, time_s in times:
        place, expected = f"{path}:{number}", before_s + gap_s
        if time_s <= before_s:
            raise InputError(place, time_s, f"a time after {before_s:g} s", "sort by time")
        if abs(time_s - expected) > 1e-6 * DAY_S:
            way_out = "every row is as far from the one above as the second from the first, 0"
            raise InputError(place, time_s, f"a row at {expected:g} s", way_out)
        before_s = time_s
    if abs(before_s + gap_s - DAY_S) > 1e-6 * DAY_S:
        number, last_s = times[-1]
        expected_text = f"the last row at {DAY_S - gap_s:g} s, so that the rows make 24 hours"
        raise InputError(f"{path}:{number}", last_s, expected_text)
