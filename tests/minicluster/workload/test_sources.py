"""How requests are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from minicluster.errors import InputError
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.sources import RequestSource, drawn

WORKLOAD = WorkloadSpec(
    requests_per_s=4.0,
    input_tokens=Lengths(distribution="lognormal", median=100, sigma=1.0, high=5000),
    output_tokens=Lengths(distribution="uniform", low=5, high=50),
)


@pytest.mark.parametrize(
    ("source", "variation"),
    [
        (RequestSource(), 1.0),
        (RequestSource(process="constant"), 0.0),
        (RequestSource(process="gamma", gap_cv=3.0), 3.0),
        (RequestSource(process="gamma", gap_cv=0.5), 0.5),
    ],
)
def test_gaps_vary_as_asked(source: RequestSource, variation: float) -> None:
    found = drawn(WORKLOAD, source, count=100_000, seed=0)
    gaps = np.diff(found.due_s, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.06 + 1e-9)
    plain = drawn(WORKLOAD, RequestSource(), count=100_000, seed=0)
    np.testing.assert_array_equal(found.input_tokens, plain.input_tokens)


def test_conversations_grow() -> None:
    """A turn's prompt is the conversation before it and a new input."""
    found = drawn(WORKLOAD, RequestSource(turns=3), count=8, seed=0)
    alone = drawn(WORKLOAD, RequestSource(), count=8, seed=0)
    assert found.session.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert found.previous.tolist() == [-1, 0, 1, -1, 3, 4, -1, 6]
    for first in (0, 3):
        said = 0
        for each in range(first, first + 3):
            assert found.input_tokens[each] == said + alone.input_tokens[each]
            said += int(alone.input_tokens[each] + alone.output_tokens[each])
    assert np.diff(found.due_s[[0, 3, 6]]).min() > 0


@pytest.mark.parametrize(
    "keys",
    [
        {"process": "fractal"},
        {"process": "gamma"},
        {"gap_cv": 2.0},
        {"users": 0},
        {"users": 3, "turns": 2},
        {"users": 3, "process": "constant"},
        {"think_s": -1.0},
        {"process": "gamma", "gap_cv": 0.0},
    ],
)
def test_contradictions_are_refused(keys: dict[str, object]) -> None:
    with pytest.raises(InputError):
        RequestSource(**keys)  # type: ignore[arg-type]
