"""Chats: as long as asked in the tokens of a model that only the server knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import chat
from loadtest.client.chat import FORMS, learn_chat
from loadtest.client.prompts import Prompts
from loadtest.run.job import ChatForm, read_job, write_job
from minicluster.errors import Exit, InputError, TargetFailed
from tests.loadtest.command import ServerStarter, run
from tests.loadtest.made import JOB as SOME
from tests.loadtest.made import REQUEST
from tests.loadtest.sending import judged, order, send

FORM = replace(FORMS[0], overhead_tokens=7)
JOB = replace(SOME, chat=FORM)
PROMPTS = Prompts(JOB)


def message(index: int, num_input: int) -> list[str]:
    asked = replace(REQUEST, index=index, input_tokens=num_input, output_tokens=5)
    read: dict[str, Any] = json.loads(PROMPTS.body(asked, PROMPTS.ids(asked)))
    [said] = read["messages"]
    assert (read["max_tokens"], read["ignore_eos"], read["stream"]) == (5, True, True)
    assert said["role"] == "user"
    return str(said["content"]).split()


@given(st.integers(0, 10_000), st.integers(8, 900))
def test_words_and_template_are_as_long_as_asked(index: int, num_input: int) -> None:
    words = message(index, num_input)
    assert len(words) + FORM.overhead_tokens == num_input
    assert set(words) <= set(FORM.words)


def test_chats_share_the_prefix_and_the_first_word() -> None:
    """Nothing else is common: a cache knows of a prompt what the workload shares."""
    one, two = message(1, 200), message(2, 200)
    shared = JOB.workload.prefix_tokens - FORM.overhead_tokens
    assert one[:shared] == two[:shared]
    assert one[shared : shared + 16] != two[shared : shared + 16]


def test_words_are_few_enough_to_be_known_and_all_different() -> None:
    for form in FORMS:
        assert len(set(form.words)) == len(form.words)


@pytest.mark.parametrize("template", [0, 12])
def test_the_template_is_learned_from_usage(start_server: ServerStarter, template: int) -> None:
    host = start_server(ttft_s=0.001, itl_s=0.001, template_tokens=template)
    assert learn_chat(host, "fake").overhead_tokens == template


@pytest.mark.parametrize(
    ("per_word", "known"), [((1, 9), FORMS[0]), ((3, 1), FORMS[1])], ids=["words", "bytes"]
)
def test_the_words_that_are_one_token_are_used(
    monkeypatch: pytest.MonkeyPatch, per_word: tuple[int, int], known: ChatForm
) -> None:
    """A vocabulary of bytes takes three tokens for a word and one for a letter."""

    def count(_host: str, _model: str, text: str, **_: object) -> int:
        spaced = " " in text
        return 5 + (len(text.split()) * per_word[0] if spaced else len(text) * per_word[1])

    monkeypatch.setattr(chat, "_prompt_tokens", count)
    assert learn_chat("http://x", "m") == replace(known, overhead_tokens=5)


def test_a_tokenizer_that_knows_none_of_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_prompt_tokens", lambda _host, _model, text, **_: 2 * len(text))
    with pytest.raises(InputError, match="completions"):
        learn_chat("http://x", "m")


@pytest.mark.parametrize(
    "behaviour", [{"fail_every": 1}, {"usage": 0}, {"garbage": "text"}, {"garbage": "deep"}]
)
def test_an_endpoint_without_chats_is_said_to_be_one(
    start_server: ServerStarter, behaviour: dict[str, Any]
) -> None:
    """No chat, no usage or garbage: one line, before any load."""
    with pytest.raises(TargetFailed, match="chat"):
        learn_chat(start_server(ttft_s=0.001, **behaviour), "fake")


def test_an_answer_that_is_left_open_has_ended(start_server: ServerStarter) -> None:
    assert learn_chat(start_server(ttft_s=0.001, unclosed=1), "fake").overhead_tokens == 0


@pytest.mark.parametrize("behaviour", [{}, {"flood": 1}, {"mute_after_tokens": 1}], ids=str)
def test_a_chat_that_never_ends_is_given_up(
    start_server: ServerStarter, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, int]
) -> None:
    """Whether it babbles or is silent, the load does not begin with waiting for ever."""
    monkeypatch.setattr(chat, "ANSWER_S", 1.0)
    with pytest.raises(TargetFailed, match="expected a chat"):
        learn_chat(start_server(ttft_s=0.001, endless=1, **behaviour), "fake")


def test_a_job_of_chats_is_read_as_written(tmp_path: Path) -> None:
    write_job(JOB, tmp_path / "run.json")
    assert read_job(tmp_path / "run.json") == JOB


def test_chats_are_loaded_and_counted(start_server: ServerStarter, tmp_path: Path) -> None:
    """Lengths by usage are those asked, template included; an empty first chunk is no token."""
    host = start_server(ttft_s=0.05, itl_s=0.01, template_tokens=12, early_chunk=1)
    found = send(order(host, chat=learn_chat(host, "fake")), tmp_path)

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
