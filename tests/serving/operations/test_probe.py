"""What `serving up` asks before it calls a deployment ready, and what it says of no answer."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import RayActorError

from minicluster.errors import TargetFailed
from serving.operations import probe
from serving.protocol.messages import EndpointConfig, RequestPhases


@pytest.mark.parametrize(("limit", "asked"), [(None, 4), ("3", 3), ("1", 1), ("100", 4)])
def test_it_keeps_the_operators_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, asked: int
) -> None:
    """The endpoint would refuse more, and no deployment with a low limit would ever be ready."""
    opened = Mock(return_value=io.BytesIO(b'data: {"choices": []}\n\ndata: [DONE]\n\n'))
    monkeypatch.setattr(probe.urllib.request, "urlopen", opened)
    monkeypatch.delenv("MINICLUSTER_MAX_OUTPUT_TOKENS", raising=False)
    if limit is not None:
        monkeypatch.setenv("MINICLUSTER_MAX_OUTPUT_TOKENS", limit)
    assert probe.stream_completion("http://endpoint", "demo", [1, 2]) >= 0
    assert json.loads(opened.call_args.args[0].data)["max_tokens"] == asked


@pytest.fixture
def served(config: EndpointConfig) -> Any:  # noqa: ANN401
    """Return a deployment of one replica each, as far as probes go."""
    roles = ("prefill", "decode")
    servers = [SimpleNamespace(name=role, role=role, replicas=1) for role in roles]
    return SimpleNamespace(
        model_id="demo",
        servers=servers,
        endpoint=config,
        of=lambda role: [s for s in servers if s.role == role],
    )


@pytest.mark.parametrize(
    ("facts", "failure", "says"),
    [
        (TimeoutError(), None, "no prefill replica answers: nothing within 600 s"),
        (RayActorError(), None, "no prefill replica answers: .*Actor"),
        (None, TimeoutError(), "a KV transfer did not come within 600 s"),
        (None, RayActorError(), "a prefill replica ended during its probe: .*Actor"),
    ],
)
def test_replicas_that_do_not_answer_are_named_in_a_line(
    served: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    facts: Exception | None,
    failure: Exception | None,
    says: str,
) -> None:
    """No traceback: exit 5, with the pool and what it did; the router stops looking for one."""
    first, handle = Mock(), Mock()
    first.result.side_effect = facts
    # Ray raises again where the call found no replica to go to.
    first.cancel.side_effect = facts
    handle.facts.remote.return_value = first
    monkeypatch.setattr(probe.serve, "get_deployment_handle", Mock(return_value=handle))
    monkeypatch.setattr(probe, "call_replicas", Mock(side_effect=failure))
    with pytest.raises(TargetFailed, match=says) as failed:
        probe.wait_until_ready(
            served, base_url="http://endpoint", vocab_size=500, report=lambda _: None
        )

    assert "\n" not in str(failed.value)
    assert first.cancel.called == bool(facts)


@pytest.mark.parametrize(
    ("handoffs_s", "stalls"),
    [
        ([0.01] * 6, 0),
        ([0.01, 5.0, 0.01, 0.01] + [0.01] * 4, 1),  # the first round again, and two more
        ([0.01, 5.0] * 15, None),
    ],
)
def test_it_is_ready_after_three_rounds_without_a_stall(
    served: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    handoffs_s: list[float],
    stalls: int | None,
) -> None:
    """A transfer that takes far longer than the fastest starts the count again, for 15 rounds."""
    left = iter(handoffs_s)
    monkeypatch.setattr(
        probe,
        "_round",
        lambda *_: [RequestPhases(prefill_s=0.0, decode_s=next(left), prefill_replica="p")],
    )
    monkeypatch.setattr(probe, "stream_completion", lambda *_: 0.25)
    given = {"base_url": "http://endpoint", "vocab_size": 500, "report": lambda _: None}
    if stalls is None:
        with pytest.raises(TargetFailed, match="15 of 30 took more than"):
            probe.wait_until_ready(served, **given)
        return
    ready = probe.wait_until_ready(served, **given)
    assert (ready.stalls, ready.handoff_s, ready.ttft_s) == (stalls, 0.01, 0.25)
    assert not [*left]
