from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.client.prompts import Prompts
from minicluster.workload.schedule import ScheduledRequest
from tests.loadtest.made import JOB, REQUEST

PROMPTS = Prompts(JOB)


def request(index: int, num_input: int, session: int | None = None) -> ScheduledRequest:
    return replace(REQUEST, index=index, input_tokens=num_input, output_tokens=5, session=session)


def body(prompts: Prompts, sent: ScheduledRequest) -> dict[str, Any]:
    """Return the body of *sent* as a server reads it."""
    read: dict[str, Any] = json.loads(prompts.body(sent, prompts.ids(sent)))
    return read


@given(st.integers(0, 10_000), st.integers(1, 900))
def test_prompts_have_exactly_the_length_asked(index: int, num_input: int) -> None:
    """A prompt is as many plain token ids as the schedule says, the answer as many tokens."""
    read = body(PROMPTS, request(index, num_input))

    assert read["prompt"] == PROMPTS.ids(request(index, num_input)).tolist()
    assert len(read["prompt"]) == num_input
    assert all(3 <= token < 500 for token in read["prompt"])
    assert (read["max_tokens"], read["ignore_eos"], read["stream"]) == (5, True, True)


@pytest.mark.parametrize("vocab_size", [4, 99, 100, 151_936])
def test_every_id_is_written_as_it_is(vocab_size: int) -> None:
    prompts = Prompts(replace(JOB, vocab_size=vocab_size))
    ids = np.unique(np.linspace(0, vocab_size - 1, 300).astype(np.int64))

    assert json.loads(prompts.body(request(0, len(ids)), ids))["prompt"] == ids.tolist()


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    """Only the prefix of the workload is common within a run, and nothing between runs."""
    other = Prompts(replace(JOB, prompt_salt=3))
    one, two = (body(PROMPTS, request(k, 200))["prompt"] for k in (1, 2))
    again = body(other, request(1, 200))["prompt"]
    block = replace(request(0, 512), content=(7,))

    assert one == body(PROMPTS, request(1, 200))["prompt"]
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert one[:16] != again[:16]
    assert PROMPTS.ids(block)[:16].tolist() != other.ids(block)[:16].tolist()


@given(
    st.lists(st.integers(-1, 1), max_size=4),
    st.lists(st.integers(-1, 1), max_size=4),
    st.integers(0, 511),
)
@example([0, -1], [0, 1], 0)
def test_prompts_share_the_blocks_that_a_trace_names(
    first: list[int], second: list[int], rest: int
) -> None:
    """Two prompts are equal as far as their blocks have equal ids, and no further."""
    made = [
        PROMPTS.ids(replace(request(k, 512 * len(blocks) + rest), content=tuple(blocks)))
        for k, blocks in enumerate((first, second))
    ]
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))

    assert [len(prompt) for prompt in made] == [512 * len(b) + rest for b in (first, second)]
    assert made[0][: 512 * common].tolist() == made[1][: 512 * common].tolist()
    after = slice(512 * common, 512 * common + 32)
    if common and min(map(len, made)) >= 512 * common + 32:
        assert made[0][after].tolist() != made[1][after].tolist()


@pytest.mark.parametrize("told", [[7, 8, 9, 10, 11], []])
def test_a_turn_begins_with_what_was_said(told: list[int]) -> None:
    """A prompt is the last one, its answer and something new; unknown answers are made up."""
    first, second = request(0, 40, session=0), request(1, 60, session=0)
    ids = PROMPTS.ids(first)
    said = PROMPTS.conversation(first, ids, told)
    prompt = PROMPTS.ids(second, said).tolist()

    assert len(prompt) == 60
    assert prompt[:40] == ids.tolist()
    assert prompt[40:45] == (told or said[40:].tolist())
    assert prompt[40:45] != prompt[16:21]
    assert body(PROMPTS, first)["return_token_ids"] is True
