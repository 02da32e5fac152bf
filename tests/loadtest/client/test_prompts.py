"""Prompts and chats: as long as asked in tokens that only the server counts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.client import chat
from loadtest.client.chat import FORMS, learn_chat
from loadtest.client.prompts import Prompts
from loadtest.run.job import ChatForm
from minicluster.errors import Exit, InputError, TargetFailed
from minicluster.specs.workload import WorkloadSpec
from minicluster.workload.schedule import ScheduledRequest
from tests.loadtest.command import ServerStarter, run
from tests.loadtest.made import JOB, REQUEST, judged
from tests.loadtest.sending import order, send

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


def test_a_request_names_its_adapter() -> None:
    """The number of its adapter is a place among the names that the endpoint lists."""
    prompts = Prompts(replace(JOB, adapters=("red", "blue")))
    names = [body(prompts, replace(request(0, 9), adapter=at))["model"] for at in (None, 0, 1)]
    assert names == [JOB.model, "red", "blue"]


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


def test_requests_of_a_class_share_its_own_prefix() -> None:
    (part,) = JOB.workload.parts
    rate = part.requests_per_s / 2
    classes = tuple(
        replace(part, name=name, requests_per_s=rate, prefix_tokens=tokens)
        for name, tokens in (("long", 12), ("short", 4), ("none", 0))
    )
    mix = replace(JOB, workload=WorkloadSpec(requests_per_s=3 * rate, classes=classes))
    of = [replace(request(k, 60), prefix_tokens=tokens) for k, tokens in enumerate((12, 12, 4, 0))]
    long, other, short, alone = (Prompts(mix).ids(each).tolist() for each in of)
    assert long[:12] == other[:12]
    assert long[:4] == short[:4]
    assert long[12:16] != other[12:16]
    assert long[4:12] != short[4:12]
    assert long[:4] != alone[:4]


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


@pytest.mark.parametrize(
    ("per_word", "known"),
    [((1, 9), FORMS[0]), ((3, 1), FORMS[1]), ((2, 2), None)],
    ids=["words", "bytes", "neither"],
)
def test_the_words_that_are_one_token_are_used(
    monkeypatch: pytest.MonkeyPatch, per_word: tuple[int, int], known: ChatForm | None
) -> None:
    """A vocabulary of bytes takes three tokens for a word and one for a letter."""

    def count(_host: str, _model: str, text: str, **_: object) -> int:
        spaced = " " in text
        return 5 + (len(text.split()) * per_word[0] if spaced else len(text) * per_word[1])

    monkeypatch.setattr(chat, "_prompt_tokens", count)
    if known:
        assert learn_chat("http://x", "m") == replace(known, overhead_tokens=5)
    else:
        with pytest.raises(InputError, match="completions"):
            learn_chat("http://x", "m")


@pytest.mark.parametrize("behaviour", [{"fail_every": 1}, {"usage": 0}, {"garbage": "text"}])
def test_an_endpoint_without_chats_is_said_to_be_one(
    start_server: ServerStarter, behaviour: dict[str, Any]
) -> None:
    """No chat, no usage or garbage: one line, before any load."""
    with pytest.raises(TargetFailed, match="chat"):
        learn_chat(start_server(ttft_s=0.001, **behaviour), "fake")


@pytest.mark.parametrize("behaviour", [{"flood": 1}, {"mute_after_tokens": 1}], ids=str)
def test_a_chat_that_never_ends_is_given_up(
    start_server: ServerStarter, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, int]
) -> None:
    """Whether it babbles or is silent, the load does not begin with waiting for ever."""
    monkeypatch.setattr(chat, "ANSWER_S", 1.0)
    with pytest.raises(TargetFailed, match="expected a chat"):
        learn_chat(start_server(ttft_s=0.001, endless=1, **behaviour), "fake")


def test_chats_are_loaded_and_counted(start_server: ServerStarter, tmp_path: Path) -> None:
    """
    Lengths by usage are those asked, template included; an empty first chunk is no token.

    An answer whose response is left open has ended with its last event.
    """
    host = start_server(ttft_s=0.05, itl_s=0.01, template_tokens=12, early_chunk=1, unclosed=1)
    learned = learn_chat(host, "fake")
    found = send(order(host, chat=learned), tmp_path)

    assert learned == replace(FORMS[0], overhead_tokens=12)
    assert found.job.chat == learned
    assert len(found.measured) == 60
    assert all(s.input_tokens == s.asked_input_tokens for s in found.measured)
    assert all(s.output_tokens == 10 for s in found.measured)
    assert all(s.ttft_send_s > 0.045 for s in found.measured)
    assert judged(found).outcomes == {"ok": 60}


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["--api", "chats"], "completions, chat"),
        (["--api", "chat", "--turns", "2"], "--turns"),
        (["--api", "chat", "--input-tokens", "12"], "of the chat template"),
    ],
)
def test_what_no_chat_can_be_is_refused(
    start_server: ServerStarter, tmp_path: Path, more: list[str], names: str
) -> None:
    host = start_server(ttft_s=0.001, template_tokens=12)
    done = run(host, tmp_path, *more)
    assert done.returncode == Exit.BAD_INPUT, done.stderr
    assert names in done.stderr.replace("\n", " ")
