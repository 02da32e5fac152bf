"""The table of steps against the step model."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from minicluster.engine_model.step_seconds import TabulatedStep
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.load import StepLoad
from sizing.latency.step import Machine, step_s
from sizing.latency.step_table import step_table

SLICING = Slicing(tp=8)


def machine(model: str = "meta-llama/Llama-3.1-70B") -> Machine:
    """Return eight H100 with a model."""
    return Machine(
        model=catalog.find_model(model),
        gpu=catalog.find_gpu("h100-sxm"),
        cluster=catalog.clusters()["h100-8"],
        engine=catalog.engines()[0],
    )


def load(n: float, p: float, b: float, s: float, each: float) -> StepLoad:
    """Return n prompt tokens in prompts of *each* after p cached, beside b sequences of s."""
    return StepLoad(
        prompts=np.array(max(1.0, n / each) if n else 0.0),
        prompt_tokens=np.array(min(n, each)),
        cached_tokens=np.array(float(p)),
        sequences=np.array(float(b)),
        context_tokens=np.array(float(s)),
    )


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-70B", "openai/gpt-oss-120b"])
def test_the_table_is_the_step_model(model: str) -> None:
    """Between grid points, for chunks, prompts, batches and contexts, it is within 4 % of it."""
    one, each = machine(model), 900
    contexts = (2000.0, 6000.0)
    table = TabulatedStep(
        step_table(one, SLICING, max_sequences=256, contexts=contexts, prompt_tokens=each)
    )
    for n, p, b, s in product((0, 37, 900, 5400), (0, 3000), (0, 5, 77, 200), (2000, 3500, 6000)):
        if n or b:
            exact = float(step_s(one, load(n, p, b, s, each), slicing=SLICING))
            chunks = [(min(n, each), p)] * max(1, n // each) if n else []
            assert table.step_s(chunks, b, b * s) == pytest.approx(exact, rel=0.04), (n, p, b, s)


def test_more_in_a_step_never_takes_less() -> None:
    """Tokens, sequences, context and cached tokens each add time; a decode step is its line."""
    table = TabulatedStep(
        step_table(
            machine(), SLICING, max_sequences=64, contexts=(1000.0, 2000.0), prompt_tokens=500
        )
    )
    for batch in (1, 7, 64):
        fixed_s, per_token_s = table.decode_line(batch)
        assert table.step_s([], batch, 1000) == pytest.approx(fixed_s + 1000 * per_token_s)
    base_s = table.step_s([(300, 0)], 8, 8000)
    for chunks, batch, context in (
        ([(600, 0)], 8, 8000), ([(300, 5000)], 8, 8000), ([(300, 0)], 16, 8000),
        ([(300, 0)], 8, 80_000), ([(300, 0), (300, 0)], 8, 8000),
    ):  # fmt: skip
        assert table.step_s(chunks, batch, context) > base_s
