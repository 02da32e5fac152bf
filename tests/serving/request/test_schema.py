"""What each field of a request may be; tests/serving/replicas asks vLLM about the same bodies."""

from __future__ import annotations

import json
import time

import pytest

from serving.protocol.messages import Refusal, RequestRefused
from serving.request.validation import check, parse_body
from serving.simulated.answering import AnswerRules, AnswerWriter
from tests.serving.request_bodies import ACCEPTED, CONTENTS, LIMITS, REFUSED, Body, chat

RULES = AnswerRules(
    model="demo", vocab_size=1000, max_model_len=100, block_size=16, unasked_tokens=10
)


def checked(kind: str, body: Body) -> Body:
    return check(kind, parse_body(json.dumps(body).encode(), 100), **LIMITS)


def test_what_no_engine_can_answer_is_a_4xx_that_names_its_parameter() -> None:
    """Before a place is taken; no message shows how we are made."""
    for kind, body, param in REFUSED:
        with pytest.raises(RequestRefused) as caught:
            checked(kind, body)
        found = caught.value.refusal
        assert (found.status, found.param) == (404 if param == "model" else 400, param), body
        assert param in found.message or found.code == "context_length_exceeded", body
        assert not {"None", "Part", "Error", "dict", "instance"} & set(found.message.split()), found
        assert len(found.message) < 400
        assert found.retry_after_s is None


def test_what_is_taken_a_simulated_engine_answers() -> None:
    """Nothing that passes makes it raise; nulls are as absent."""
    for kind, body in ACCEPTED:
        passed = checked(kind, body)
        assert None not in passed.values()
        request = RULES.read(kind, passed)
        assert not isinstance(request, Refusal), (body, request)
        assert AnswerWriter.of(request).whole({})["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(temperature=3), "temperature: must be less than or equal to 2."),
        (chat(tools=[{"function": {}}]), "tools[0].function.name: expected a value."),
        (chat(stop=["a", ""]), "stop[1]: must have at least 1 character."),
        (chat(messages=[1]), "messages[0]: must be an object."),
        (
            chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
            "messages[0].content[0].text: must be a valid string.",
        ),
        (chat(messages=[{"content": "x"}]), "messages[0].role: expected a value."),
        (chat(logit_bias={"x" * 999: 1}), "logit_bias: expected token ids, each with a number."),
        (chat(documents=[{"x" * 999: 1}]), f"documents[0].{'x' * 64}: must be a valid string."),
    ],
)
def test_a_refusal_says_where_and_what(body: tuple[str, Body], message: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        checked(*body)
    assert caught.value.refusal.message.startswith(message)


def test_a_message_without_text_may_be_one_that_calls() -> None:
    for content in CONTENTS:
        message = {"role": "assistant", "content": content}
        if content is None:
            assert checked(*chat(messages=[message]))["messages"] == [message]
        else:
            with pytest.raises(RequestRefused):
                checked(*chat(messages=[message]))


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{}] * 60_000),
        chat(messages=[{"role": "user", "content": [{}] * 60_000}]),
        chat(messages=[{"role": "user", "tool_calls": [{}] * 60_000}]),
        chat(logit_bias={f"a{number}": "b" for number in range(30_000)}),
        chat(stop_token_ids=["a"] * 60_000),
    ],
)
def test_one_wrong_item_of_many_is_enough(body: tuple[str, Body]) -> None:
    """A report of each would stop everybody else for seconds."""
    seconds = []
    for _ in range(3):  # the least: collecting the garbage of other tests takes most of a second
        begun_s = time.process_time()
        with pytest.raises(RequestRefused):
            check(*body, **LIMITS)
        seconds.append(time.process_time() - begun_s)
    assert min(seconds) < 0.2
