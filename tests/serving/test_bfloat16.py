"""The demo model in bfloat16, split over two pools, beside a single engine: within rounding."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .client import Answer, ask
from .deployed import Shared, up
from .faults.reference import bare_server
from .plans import make_deployment, make_plan

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

MAX_TOKENS = 24
ROUNDING = 2 / 16 + 1e-3
"""
Of bfloat16, in log-probability. The best logits here are between 8 and 16, where neighbouring
bfloat16 numbers are 1/16 apart: two logits of which each is rounded to a neighbour swap places if
they are up to 2/16 apart.
"""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return 48 prompts of 16 to 300 tokens."""
    rng = random.Random(11)  # noqa: S311
    return [[rng.randrange(2361, 4361) for _ in range(rng.randint(16, 300))] for _ in range(48)]


@pytest.fixture(scope="module")
def single(
    tmp_path_factory: pytest.TempPathFactory,
    demo_model: Path,
    prompts: list[list[int]],
    shared: Shared,
) -> list[Answer]:
    """Return what a single engine answers in bfloat16, one at a time."""
    shared.end()
    log = tmp_path_factory.mktemp("single") / "server.txt"
    with bare_server(demo_model, dtype="bfloat16", log=log) as url:
        return [ask(url, prompt, MAX_TOKENS, "bare") for prompt in prompts]


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory,
    demo_model: Path,
    single: list[Answer],  # noqa: ARG001  (first, so that the two do not share cores)
) -> Iterator[str]:
    with up(tmp_path_factory.mktemp("bfloat16"), make_plan(make_deployment(demo_model))) as found:
        yield found


def test_bfloat16_under_load(
    url: str, prompts: list[list[int]], single: list[Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    """With 16 at once tokens differ only where the two best are closer than rounding errs."""
    with ThreadPoolExecutor(max_workers=16) as clients:
        answers = list(clients.map(lambda p: ask(url, p, MAX_TOKENS, "bf16"), prompts))
    gaps = []
    for right, answer in zip(single, answers, strict=True):
        places = [i for i in range(MAX_TOKENS) if right.tokens[i] != answer.tokens[i]]
        if places:  # what follows the first other token answers another question
            best, second = right.best_two[places[0]]
            gaps.append(best - second)
    with capsys.disabled():
        sys.stdout.write(f"\nbfloat16: {len(gaps)} of {len(prompts)} answers part, ")
        sys.stdout.write(f"where the two best are at most {max(gaps, default=0):.2g} apart\n")
    assert max(gaps, default=0.0) <= ROUNDING
    assert len(gaps) < len(prompts) / 2
