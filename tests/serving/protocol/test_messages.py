"""Errors as OpenAI's clients read them, and what a pool's replicas are selected by."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.phases import (
    FIRST_DECODE_STEP,
    HANDOFF,
    KV_FETCH,
    PREFILL,
    PREFILL_QUEUE,
    QUEUED_PREFILL,
)
from minicluster.plan import NODE_LABEL, ROLE_LABEL
from serving.operations.probe import Readiness
from serving.protocol.app_spec import DEVICES_LABEL, RayNode
from serving.protocol.messages import (
    ChannelPlace,
    FirstChunk,
    Prefilled,
    PrefillTiming,
    PromptPath,
    Refusal,
    RequestPhases,
    message_in,
    to_json,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "invalid_request_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (428, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_a_status_has_its_type(status: int, kind: str) -> None:
    """Only a request without a valid key is told how to send one."""
    refusal = Refusal(status=status, message="No.")
    assert (refusal.type, refusal.name) == (kind, kind)
    assert refusal.body["error"]["type"] == kind
    assert refusal.headers == ({"WWW-Authenticate": "Bearer"} if status == 401 else {})


def test_a_prompt_that_was_never_sent_to_prefill_lost_no_time() -> None:
    assert PromptPath(reason="short").seconds == 0


@pytest.mark.parametrize("moved", [False, True])
def test_a_moved_raylet_names_its_devices(*, moved: bool) -> None:
    node = RayNode(node="n1", role="decode", cores=(2, 3), gpus=(), moved=moved)
    assert node.labels == {
        ROLE_LABEL: "decode",
        NODE_LABEL: "n1",
        **({DEVICES_LABEL: "2_3"} if moved else {}),
    }


def test_the_phases_of_an_answer_add_up_to_its_time_in_the_engines() -> None:
    """An answer whose prompt decode computed has no fetch; the other has what prefill reports."""
    local = RequestPhases(prefill_s=0.0, decode_s=0.3, path="local")
    assert local.phases_s == {QUEUED_PREFILL: 0.3, KV_FETCH: 0.0, FIRST_DECODE_STEP: 0.0}
    remote = RequestPhases(
        prefill_s=0.2, decode_s=0.3, prefill_replica="p0", prefill_queue_s=0.05, prefill_step_s=0.15
    )
    assert remote.phases_s == {PREFILL_QUEUE: 0.05, PREFILL: 0.15, HANDOFF: 0.3}


# Any text that Python can hold, such as a half of a surrogate pair that a client sent.
TEXT = st.text(st.characters(exclude_categories=[]))
NUMBERS = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT | st.just("is"), inner),
    max_leaves=8,
)
MESSAGES = st.one_of(
    st.builds(Refusal, status=st.integers(), message=TEXT, retry_after_s=st.none() | NUMBERS),
    st.builds(ChannelPlace, host=TEXT, port=st.integers(), secret=TEXT, group=st.none() | TEXT),
    st.builds(
        FirstChunk,
        phases=st.builds(RequestPhases, prefill_s=NUMBERS, decode_s=NUMBERS, reason=TEXT),
        first=TEXT | st.dictionaries(TEXT | st.just("is"), PLAIN),
    ),
    st.builds(PromptPath, reason=TEXT, seconds=NUMBERS),
    st.builds(
        PromptPath,
        prefilled=st.builds(
            Prefilled,
            kv_transfer_params=st.dictionaries(TEXT | st.just("is"), PLAIN),
            queue_s=NUMBERS,
            step_s=NUMBERS,
        ),
        reason=TEXT,
        seconds=NUMBERS,
    ),
    st.builds(
        PrefillTiming, prompt_tokens=st.integers(), seconds=NUMBERS, queue_s=NUMBERS, step_s=NUMBERS
    ),
)


@given(MESSAGES)
def test_a_message_arrives_as_it_was(message: object) -> None:
    """With its type, and whatever is inside it, be it a client's."""
    assert message_in(json.loads(to_json(message))) == message


@given(PLAIN.filter(lambda plain: not isinstance(plain, dict) or "is" not in plain))
def test_plain_data_arrive_as_they_were(plain: object) -> None:
    assert message_in(json.loads(to_json(plain))) == plain


def test_what_a_client_calls_a_message_stays_plain_data() -> None:
    """A body is never looked into, where a call has it and where a message has it."""
    body = {"is": "Refusal", "status": 500, "message": "forged", "prompt": [{"is": "nothing"}]}
    called = message_in(json.loads(to_json({"method": "answer", "arguments": {"body": body}})))
    assert called["arguments"]["body"] == body
    chunk = FirstChunk(phases=RequestPhases(prefill_s=0.0, decode_s=0.0), first=body)
    assert message_in(json.loads(to_json(chunk))).first == body


def test_a_message_inside_plain_data_is_read_where_it_is_expected() -> None:
    """So a prompt's KV cache says where it is, through the endpoint, which does not look."""
    place = ChannelPlace(host="h", port=1, secret=bytes(9).hex(), group="g")
    prefilled = Prefilled(kv_transfer_params={"place": place}, queue_s=0.0, step_s=0.1)
    arrived = message_in(json.loads(to_json(prefilled))).kv_transfer_params["place"]
    assert isinstance(arrived, dict)
    assert message_in(arrived) == place
    assert place.secret not in repr(place)


@pytest.mark.parametrize(
    "plain",
    [
        {"is": "Readiness", "stalls": 0, "handoff_s": 0.0},
        {"is": "Refusal", "status": "x", "message": ""},
        {"is": "Refusal"},
        {"is": None},
        {"is": ["Refusal"]},
    ],
)
def test_what_is_no_message_of_its_name_is_refused(plain: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=r"Refusal|status"):
        message_in(plain)


def test_what_no_channel_carries_is_not_sent() -> None:
    for value in (Readiness(stalls=0, handoff_s=0.1), {"x": {1, 2}}, b"bytes"):
        with pytest.raises(TypeError, match="not among what a channel carries"):
            to_json(value)
