"""Specs refuse numbers outside the limits that their types say, and name them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.config import parse
from minicluster.errors import InputError
from minicluster.specs.checks import Count, Fraction, NotNegative, Positive, Spec, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited(Spec):
    """A spec with a number of every kind."""

    count: Count = 1
    whole: Whole | None = None
    share: Fraction = 1.0
    seconds: NotNegative = 0.0
    sizes: tuple[Positive, ...] = ()
    peaks: dict[str, Positive] = field(default_factory=dict)
    free: float = 0.0

    def _place(self, key: str) -> str:
        return f"limited.{key}"


GOOD = Limited(count=3, whole=0, share=0.5, seconds=2.5, sizes=(1.0, 2.0), peaks={"bf16": 3.0})


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"count": 0}, "limited.count is 0"),
        ({"whole": -1}, "limited.whole is -1"),
        ({"share": 0.0}, "limited.share is 0.0"),
        ({"share": 1.5}, "limited.share is 1.5"),
        ({"seconds": -0.1}, "limited.seconds is -0.1"),
        ({"seconds": float("nan")}, "limited.seconds is nan"),
        ({"sizes": (1.0, float("inf"))}, "limited.sizes.1 is inf"),
        ({"peaks": {"bf16": 1.0, "fp8": 0.0}}, "limited.peaks.fp8 is 0.0"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, object], place: str) -> None:
    with pytest.raises(InputError, match=place):
        replace(GOOD, **change)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_without_limits_may_be_any(value: float) -> None:
    assert replace(GOOD, free=value).count == 3


def test_files_are_held_to_the_same_limits() -> None:
    """What a file says is checked as what a program says; unknown keys are refused."""
    assert parse(Limited, {"count": 3, "peaks": {"bf16": 3.0}}, place="f").peaks == {"bf16": 3.0}
    with pytest.raises(InputError, match=r"f: limited\.count is 0; expected a positive"):
        parse(Limited, {"count": 0}, place="f")
    with pytest.raises(InputError, match="no such key"):
        parse(Limited, {"counts": 3}, place="f")
