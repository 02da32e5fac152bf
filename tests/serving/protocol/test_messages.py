"""Errors as OpenAI's clients read them, and what a pool's replicas are selected by."""

from __future__ import annotations

import pytest

from minicluster.phases import (
    FIRST_DECODE_STEP,
    HANDOFF,
    KV_FETCH,
    PREFILL,
    PREFILL_QUEUE,
    QUEUED_PREFILL,
)
from minicluster.plan import NODE_LABEL, ROLE_LABEL
from serving.protocol.app_spec import DEVICES_LABEL, RayNode
from serving.protocol.messages import LocalPrefill, Refusal, RequestPhases


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
    assert LocalPrefill(reason="short").seconds == 0


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
