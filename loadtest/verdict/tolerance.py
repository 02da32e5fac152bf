"""How far predicted means may be from measured ones."""

from __future__ import annotations

from minicluster.errors import InputError
from minicluster.specs.slo import METRICS

TOLERANCE = {"ttft": 0.20, "tpot": 0.15}
"""
Default tolerance of the predicted means at the pace of the engines, as fractions of the measured
ones; of the plan's own prediction where the engines' pace is not known.
"""


def parse_tolerance(text: str) -> dict[str, float]:
    """
    Parse `ttft=0.2,tpot=0.15`, or one number for both.

    Raises InputError: another form, or a fraction that is not positive.
    """
    expectation = "fractions like ttft=0.2,tpot=0.15, or one for both"
    try:
        if "=" not in text:
            tolerance = dict.fromkeys(TOLERANCE, float(text))
        else:
            pairs = (part.split("=") for part in text.split(","))
            tolerance = {key.strip(): float(value) for key, value in pairs}
    except ValueError:
        raise InputError("--tolerance", text, expectation) from None
    if not set(tolerance) <= set(METRICS) or not all(
        0 < value < float("inf") for value in tolerance.values()
    ):
        raise InputError("--tolerance", text, expectation)
    return tolerance
