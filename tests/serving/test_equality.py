"""Does splitting prefill from decode change what the model says? (float32, one at a time)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from serving.cluster import free_ports
from sizing.child import run_child
from sizing.plan import to_json

from .client import Answer, ask, difference
from .reference import answers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import DeploymentMaker

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
MAX_MODEL_LEN = 2048
MAX_TOKENS = 24
BLOCK = 32
LENGTHS = sorted(
    {
        *(1, 2, 3, 5, 8, 13, 21, 50, 100, 200, 300, 700, 1000, 1500),
        *(
            blocks * BLOCK + beside
            for blocks in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
            for beside in (-1, 0, 1)
        ),
        MAX_MODEL_LEN - MAX_TOKENS - 2,
        MAX_MODEL_LEN - MAX_TOKENS - 1,
        MAX_MODEL_LEN - MAX_TOKENS,
    }
)
TOLERANCE = 1e-3
"""Of a log-probability: float32 sums in another order differ by far less."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return 50 prompts of words that the model knows, from one token to the longest."""
    assert len(LENGTHS) == 50
    rng = random.Random(7)  # noqa: S311
    return [[rng.randrange(2361, 4361) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, prompts: list[list[int]]
) -> list[Answer]:
    """Return what a single engine answers."""
    return answers_of(
        tmp_path_factory.mktemp("reference"),
        model=demo_model,
        dtype="float32",
        prompts=prompts,
        max_tokens=MAX_TOKENS,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that the deployment is made from."""
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def base_url(
    place: Path,
    demo_model: Path,
    make_deployment: DeploymentMaker,
    reference: list[Answer],  # noqa: ARG001  (first, so that the two do not share memory)
) -> Iterator[str]:
    """Have a float32 split deployment up whose decode pool can be told to spoil transfers."""
    (place / "deployment.json").write_text(to_json(make_deployment(demo_model, dtype="fp32")))
    [port] = free_ports(1)
    command = [sys.executable, HERE / "faulty.py", "up", "deployment.json", str(port)]
    try:
        assert run_child(list(map(str, command)), cwd=place) == 0
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([sys.executable, "-m", "serving.cli", "down"], cwd=place, check=True)


def _spoil(place: Path, how: str) -> None:
    """Have transfers lose a block from now on, or no longer."""
    subprocess.run([sys.executable, HERE / "faulty.py", "spoil", how], cwd=place, check=True)


def test_reference_says_something(reference: list[Answer]) -> None:
    """Each reference answer holds at least 8 different tokens: equality means something."""
    assert min(len(set(answer.tokens)) for answer in reference) >= 8


def test_split_equals_single_engine(
    base_url: str,
    prompts: list[list[int]],
    reference: list[Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tokens are equal for every prompt, and best log-probabilities agree within 1e-3."""
    answers = [ask(base_url, prompt, MAX_TOKENS, "whole") for prompt in prompts]
    found = {
        len(prompt): difference(right, answer, tolerance=TOLERANCE)
        for prompt, right, answer in zip(prompts, reference, answers, strict=True)
    }
    worst = max(
        abs(right.best_two[i][0] - answer.best_two[i][0])
        for right, answer in zip(reference, answers, strict=True)
        for i in range(MAX_TOKENS)
    )
    with capsys.disabled():
        equal = sum(text is None for text in found.values())
        sys.stdout.write(f"\nfloat32: {equal} of {len(found)} answers equal, ")
        sys.stdout.write(f"log-probabilities within {worst:.1e}\n")
    assert {length: text for length, text in found.items() if text} == {}


def test_a_zeroed_block_is_noticed(
    base_url: str, place: Path, prompts: list[list[int]], reference: list[Answer]
) -> None:
    """With one KV block zeroed on the way the same check fails, and without it holds again."""
    some = [i for i, length in enumerate(LENGTHS) if length in {2, 33, 64, 200, 768, 2024}]
    _spoil(place, "on")
    for i in some:
        answer = ask(base_url, prompts[i], MAX_TOKENS, "spoiled")
        assert difference(reference[i], answer, tolerance=TOLERANCE), LENGTHS[i]
    _spoil(place, "off")
    for i in some:
        answer = ask(base_url, prompts[i], MAX_TOKENS, "whole again")
        assert difference(reference[i], answer, tolerance=TOLERANCE) is None
