"""The profile of a day: what is read, and what is refused by place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minicluster.errors import InputError
from minicluster.workload.day_profile import DAY_S, read_profile


def written(path: Path, text: str) -> Path:
    """Write a profile."""
    file = path / "day.csv"
    file.write_text(text)
    return file


def test_both_units_say_the_same(tmp_path: Path) -> None:
    """Hours and shares of the peak are read as seconds and rates; comments are none."""
    shares = "# a day\nhour, peak_fraction\n0, 0.25\n12, 1\n"
    rates = "time_s,requests_per_s\n0,5\n43200,20\n"
    found = [read_profile(written(tmp_path, text), 20.0) for text in (shares, rates)]
    assert found[0] == found[1]
    assert found[0].peak_requests_per_s == 20


def test_rates_change_linearly_and_the_day_repeats(tmp_path: Path) -> None:
    """After the last row the rate goes back to that of the first."""
    found = read_profile(written(tmp_path, "hour,requests_per_s\n0,5\n12,20\n"), 1.0)
    times_s = np.array([0, 6, 12, 18, 24, 30]) * 3600.0
    assert found.at(times_s).tolist() == [5, 12.5, 20, 12.5, 5, 12.5]
    assert found.at(times_s + DAY_S).tolist() == found.at(times_s).tolist()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"day.csv is 'an empty file'; it has to be the columns time_s or hour"),
        ("hour,rate\n0,1\n12,1\n", r"day.csv:1 is 'hour,rate'; it has to be the columns"),
        ("hour,requests_per_s,x\n0,1,2\n", r"day.csv:1 is 'hour,requests_per_s,x'"),
        ("hour,requests_per_s\n0,1\n12\n", r"day.csv:3 is '12'; it has to be two numbers"),
        ("hour,requests_per_s\n0,1\n12,-2\n", r"day.csv:3: requests_per_s is -2.0"),
        ("hour,requests_per_s\n0,1\n12,nan\n", r"day.csv:3: requests_per_s is nan"),
        ("hour,requests_per_s\n0,1\n12,many\n", r"day.csv:3: requests_per_s is 'many'"),
        ("hour,peak_fraction\n0,1\n12,1.5\n", r"day.csv:3: peak_fraction is 1.5"),
        ("hour,requests_per_s\n0,0\n12,0\n", r"no requests all day"),
        ("hour,requests_per_s\n0,1\n", r"1 rows"),
        ("hour,requests_per_s\n0,1\n8,1\n4,1\n", r"day.csv:4 is 14400.0.*sort by time"),
        ("hour,requests_per_s\n0,1\n0,1\n", r"day.csv:2 is 0.0.*sort by time"),
        (
            "hour,requests_per_s\n0,1\n6,1\n18,1\n",
            r"day.csv:4 is 64800.0; it has to be a row at 43200",
        ),
        ("hour,requests_per_s\n1,1\n13,1\n", r"day.csv:2 is 3600.0; it has to be a row at 0 s"),
        ("hour,requests_per_s\n0,1\n6,1\n", r"it has to be the last row at 64800 s"),
    ],
)
def test_what_makes_no_day_is_refused_by_line(tmp_path: Path, text: str, says: str) -> None:
    """The message names file, line, value and what is expected."""
    with pytest.raises(InputError, match=says):
        read_profile(written(tmp_path, text), 10.0)


def test_no_file_is_refused(tmp_path: Path) -> None:
    """A missing file, and one that is no text, are named."""
    with pytest.raises(InputError, match=r"nowhere.csv does not exist"):
        read_profile(tmp_path / "nowhere.csv", 1.0)
    (tmp_path / "day.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not text in UTF-8"):
        read_profile(tmp_path / "day.csv", 1.0)
