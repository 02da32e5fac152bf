"""What an SLO says: limits, and the share of requests that keep them."""

from __future__ import annotations

import pytest

from minicluster.specs.slo import SloSpec
from minicluster.stats.quantiles import LEVELS


def test_the_level_is_the_number_of_the_percentile() -> None:
    """The 99 of p99, as a share."""
    for percentile in LEVELS:
        assert SloSpec(percentile=percentile).level == float(percentile[1:]) / 100


@pytest.mark.parametrize(
    ("slo", "limits_s", "per_token_s"),
    [
        (SloSpec(ttft_s=2.0, tpot_s=0.1), {"ttft": 2.0, "tpot": 0.1}, 0.1),
        (SloSpec(ttft_s=2.0, tpot_s=None, itl_s=0.2), {"ttft": 2.0, "itl": 0.2}, 0.2),
        (SloSpec(tpot_s=0.1, itl_s=0.2), {"ttft": 1.0, "tpot": 0.1, "itl": 0.2}, 0.1),
        (SloSpec(tpot_s=None), {"ttft": 1.0}, None),
    ],
)
def test_limits_are_those_that_are_set(
    slo: SloSpec, limits_s: dict[str, float], per_token_s: float | None
) -> None:
    assert slo.limits_s == limits_s
    assert slo.per_token_s == per_token_s
