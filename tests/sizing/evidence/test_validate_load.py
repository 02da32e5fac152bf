"""What a measured row sends, and to what: counts, lengths, queues, slots, protocols."""

from __future__ import annotations

import numpy as np
import pytest

from sizing.evidence.protocol import protocol_of, recipe_of
from sizing.evidence.row_config import row_config
from sizing.evidence.row_system import (
    MOST_REQUESTS,
    OPEN_REQUESTS,
    cut_exponential,
    queues_of,
    row_arrivals,
    row_system,
    sent_before,
)
from tests.sizing.evidence.rows import row

STAGE = {
    "source": "blis", "model": "mistralai/Mistral-Nemo-Instruct-2407", "weight_dtype": "bf16",
    "gpus": "2", "tp": "2", "load": "open", "requests_per_s": "2.5", "isl": "547", "osl": "248",
}  # fmt: skip
WAITING = {
    "source": "inferencex", "gpu": "h200-sxm", "engine": "trtllm", "gpus": "2", "tp": "2",
    "osl": "1024",
}  # fmt: skip
QWEN = {
    "source": "inferencex", "model": "Qwen/Qwen3.5-397B-A17B", "gpu": "b200-sxm",
    "engine": "sglang", "engine_version": "0.5.9", "weight_dtype": "fp8", "gpus": "8", "tp": "8",
    "measured": "2026-03-24", "concurrency": "64",
}  # fmt: skip
MINIMAX = {
    "engine": "vllm", "model": "MiniMaxAI/MiniMax-M2.5", "gpu": "b300-sxm",
    "measured": "2026-04-17", "engine_version": "0.19.0",
}  # fmt: skip
MINIMAX_ROW = QWEN | MINIMAX | {"isl": "1024"}
OSS = {"engine": "vllm", "model": "openai/gpt-oss-120b", "weight_dtype": "fp4"}
SHARE_GPT = {
    "source": "iog", "load": "open", "requests_per_s": "32", "requests": "200",
    "lengths": "distribution", "isl": "205", "osl": "217",
}  # fmt: skip
BUDGET = {"max_num_batched_tokens": "4096"}


def test_lengths_are_drawn_as_the_schema_says() -> None:
    """Uniform in [(1 - j) nominal, nominal]: mean 0.9 at j = 0.2; the same every time."""
    jittered = row(concurrency="400", length_jitter="0.2", isl="1000")
    found, again = (row_arrivals(jittered, queues=1) for _ in range(2))
    assert (found.input_tokens.min(), found.input_tokens.max()) == (800, 1000)
    assert found.input_tokens.mean() == pytest.approx(900, rel=0.01)
    np.testing.assert_array_equal(found.output_tokens, again.output_tokens)
    assert set(row_arrivals(row(), queues=1).input_tokens) == {1024}


def test_prompts_of_a_known_range_are_drawn_from_it() -> None:
    """Exponential between the shortest and the longest, with the row's mean; else all alike."""
    found = row_arrivals(row(**SHARE_GPT), queues=1).input_tokens
    assert found.mean() == pytest.approx(205, rel=0.01)
    assert 4 <= found.min() < 10
    assert 900 < found.max() <= 1024
    below = np.mean(found < 205)
    assert below == pytest.approx(1 - np.exp(-1), abs=0.03)  # as of an exponential distribution
    assert set(row_arrivals(row(**SHARE_GPT | {"source": "here"}), queues=1).input_tokens) == {205}


@pytest.mark.parametrize(("mean", "spread"), [(24, 20), (514, 1020 / 12**0.5), (1004, 20)])
def test_a_cut_exponential_has_its_mean(mean: float, spread: float) -> None:
    """In the middle of the range it is uniform; near an end it is as narrow as that is near."""
    found = cut_exponential(mean, 4, 1024, 4000)
    assert found.mean() == pytest.approx(mean, abs=0.2)
    assert found.std() == pytest.approx(spread, rel=0.02)


def test_a_longer_prompt_is_tokenised_for_longer() -> None:
    """7 ms with a prompt of 500 tokens, 1.7 ms more for each further 1,000."""
    asked = [row(isl=tokens) for tokens in ("500", "4500")]
    found_s = [row_system(each, row_config(each)).path.request_s for each in asked]
    assert found_s == pytest.approx([7e-3, 13.8e-3])


def test_queues_share_users_and_batches() -> None:
    """Two copies of attention: half of the users, who send ten requests or as many as it says."""
    closed = row(tp="4", concurrency="9")
    assert queues_of(closed) == 2
    found = row_arrivals(closed, queues=2)
    assert (len(found), (found.previous < 0).sum()) == (50, 5)
    found = row_arrivals(row(tp="4", concurrency="9", requests="36"), queues=2)
    assert (len(found), (found.previous < 0).sum()) == (18, 5)
    piped, batch = {"tp": "2", "pp": "2"}, {"load": "static", "batch_size": "9"}
    assert queues_of(row(**piped)) == 4  # two batches under way in each copy
    assert queues_of(row(**piped | batch)) == 2
    found = row_arrivals(row(**batch), queues=2)
    assert len(found) == 5
    assert not found.due_s.any()


@pytest.mark.parametrize(
    ("cells", "count"),
    [
        ({}, OPEN_REQUESTS),
        ({"requests": "300", "duration_s": "600"}, 150),
        ({"duration_s": "60000"}, MOST_REQUESTS),
    ],
)
def test_an_open_loop_is_as_long_as_its_row_says(cells: dict[str, str], count: int) -> None:
    """Requests counted, or the duration times the rate; else a default. Two queues share them."""
    found = row_arrivals(row(load="open", requests_per_s="4", **cells), queues=2)
    assert len(found) == count
    assert found.due_s[-1] / len(found) == pytest.approx(1 / 2, rel=0.2)


def test_prompts_sent_before_are_in_the_cache() -> None:
    """All but the first round, of which only the named prefix is."""
    drawn = row_arrivals(row(concurrency="1", prefix_tokens="100"), queues=1)
    assert sent_before(drawn, but=2).prefix_tokens.tolist() == [100, 100] + [1024] * 8


def test_a_row_is_a_stage_of_a_documented_run() -> None:
    """By source, lengths, load and rate; anything else says all there is in its columns."""
    found = protocol_of(row(**STAGE))
    assert found.prompts == 45
    for cells in (
        {"source": "here"}, {"isl": "548"}, {"osl": "9"}, {"requests_per_s": "3"},
        {"load": "closed"},
    ):  # fmt: skip
        assert protocol_of(row(**STAGE | cells)) is None


def test_a_recipe_is_that_of_its_loads_and_widths() -> None:
    """InferenceX lets prompts wait on fewer than eight GPUs at 1,024 in and out, nowhere else."""
    cases: tuple[dict[str, str], ...]
    cases = ({}, {"gpus": "8", "tp": "8"}, {"osl": "8192"}, {"source": "here"})
    waits = [recipe_of(row(**WAITING | cells)).wait_steps for cells in cases]
    assert waits == [20, None, None, None]


@pytest.mark.parametrize(
    ("cells", "setting", "value"),
    [
        ({"users": "4"}, "receive_steps", 10),
        ({"users": "16"}, "receive_steps", 30),
        ({"measured": "2026-04-13"}, "receive_steps", 10),
        ({"model": "zhipuai/GLM-5"}, "receive_steps", 1),
        ({"model": "deepseek-ai/DeepSeek-R1", "gpu": "h200-sxm"}, "token_budget", 32768),
        ({}, "token_budget", 32768),
        ({"gpu": "b300-sxm"}, "token_budget", 16384),
        ({"model": "deepseek-ai/DeepSeek-R1", "weight_dtype": "fp4"}, "token_budget", 16384),
        ({"load": "static", "batch_size": "16"}, "receive_steps", None),
        (MINIMAX, "captured_tokens", 2048),
        (MINIMAX | {"measured": "2026-04-06"}, "captured_tokens", None),
        (OSS | {"engine_version": "0.18.0"}, "captured_tokens", 2048),
        (OSS | {"engine_version": "0.11.2"}, "captured_tokens", None),
    ],
)
def test_recipes_of_inferencex(cells: dict[str, str], setting: str, value: int | None) -> None:
    """What SGLang, and vLLM, were started with: by GPU, model, users, day and version."""
    users = {"concurrency": cells.get("users", "64")}
    assert getattr(recipe_of(row(**QWEN | cells | users)), setting) == value


def test_a_recipe_reaches_the_engine_and_its_scheduler() -> None:
    """Looks at new requests, captured sizes, and budgets, unless the row names one."""
    asked = row(**QWEN)
    limits = row_system(asked, row_config(asked)).decode.limits
    assert limits.rules.receive_steps == 30
    found = [row_config(row(**MINIMAX_ROW | cells)) for cells in ({}, {"isl": "8192"}, BUDGET)]
    assert [each.token_budget for each in found] == [2048, 16384, 4096]
    assert {each.machine.engine.captured_tokens for each in found} == {2048}


@pytest.mark.parametrize(
    ("source", "budget"), [("here", 8192), ("silicon-internal", 8 + 1000 + 1500)]
)
def test_only_a_source_that_makes_recipes_has_a_budget_for_its_load(
    source: str, budget: int
) -> None:
    """A prompt, a token of every user and some to spare; rows of others have the default."""
    asked = row(source=source, gpu="h200-sxm", isl="1000", osl="100", concurrency="8")
    assert row_config(asked).token_budget == budget
