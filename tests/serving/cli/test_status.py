"""`serving status` counts the engines of a pool in the plan's words."""

from __future__ import annotations

import pytest

from serving.cli.inspect import planned_engines
from tests.serving.plans import make_pool


@pytest.mark.parametrize(
    ("replicas", "dp", "said"),
    [(3, 1, "3 replicas"), (1, 8, "8 ranks in 1 group"), (2, 4, "8 ranks in 2 groups")],
)
def test_engines_of_groups_are_ranks_and_others_replicas(replicas: int, dp: int, said: str) -> None:
    pool = make_pool("decode", tuple(range(replicas * dp)), replicas=replicas, dp=dp, ep=dp)
    assert planned_engines(pool) == said
