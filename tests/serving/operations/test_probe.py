"""What `serving up` asks before it calls a deployment ready, and what it says of no answer."""

from __future__ import annotations

import io
import json
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.errors import TargetFailed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.exceptions import RayActorError

    from serving.operations import probe

if TYPE_CHECKING:
    from urllib.request import Request

    from serving.protocol.endpoint_config import EndpointConfig


@pytest.mark.parametrize(("limit", "asked"), [(None, 4), ("3", 3), ("1", 1), ("100", 4)])
def test_it_keeps_the_operators_limit(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, asked: int
) -> None:
    """The endpoint would refuse more, and no deployment with a low limit would ever be ready."""
    bodies: list[dict[str, Any]] = []

    def opened(request: Request, timeout: float) -> Any:  # noqa: ANN401
        assert timeout > 0
        assert isinstance(request.data, bytes)
        bodies.append(json.loads(request.data))
        return io.BytesIO(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    monkeypatch.setattr(probe.urllib.request, "urlopen", opened)
    monkeypatch.delenv("MINICLUSTER_MAX_OUTPUT_TOKENS", raising=False)
    if limit is not None:
        monkeypatch.setenv("MINICLUSTER_MAX_OUTPUT_TOKENS", limit)
    assert probe.stream_completion("http://endpoint", "demo", [1, 2]) >= 0
    assert [body["max_tokens"] for body in bodies] == [asked]


@pytest.fixture
def served(config: EndpointConfig) -> Any:  # noqa: ANN401
    """Return a deployment of one replica each, as far as probes go."""
    roles = ("prefill", "decode")
    servers = [SimpleNamespace(name=role, role=role, replicas=1) for role in roles]
    return SimpleNamespace(
        servers=servers, endpoint=config, of=lambda role: [s for s in servers if s.role == role]
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
    cancelled: list[str] = []

    def result(*, timeout_s: float) -> None:
        assert timeout_s > 0
        if facts:
            raise facts

    def broadcast(*_: object) -> None:
        assert failure
        raise failure

    def cancel() -> None:
        cancelled.append("facts")
        if facts:
            raise facts  # as Ray does where the call found no replica to go to

    response = SimpleNamespace(result=result, cancel=cancel)
    handle = SimpleNamespace(facts=SimpleNamespace(remote=lambda: response))
    monkeypatch.setattr(probe.serve, "get_deployment_handle", lambda *_: handle)
    monkeypatch.setattr(probe, "broadcast", broadcast)
    with pytest.raises(TargetFailed, match=says) as failed:
        probe.wait_until_ready(
            served, base_url="http://endpoint", vocab_size=500, report=lambda _: None
        )

    assert "\n" not in str(failed.value)
    assert cancelled == (["facts"] if facts else [])
