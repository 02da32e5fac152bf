"""The completion that `serving up` streams before it calls a deployment ready."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from serving import ready

if TYPE_CHECKING:
    from urllib.request import Request


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
        return nullcontext([b'data: {"choices": []}\n', b"\n", b"data: [DONE]\n"])

    monkeypatch.setattr(ready.urllib.request, "urlopen", opened)
    monkeypatch.delenv("MINICLUSTER_MAX_OUTPUT_TOKENS", raising=False)
    if limit is not None:
        monkeypatch.setenv("MINICLUSTER_MAX_OUTPUT_TOKENS", limit)
    assert ready.stream_completion("http://door", "demo", [1, 2]) >= 0
    assert [body["max_tokens"] for body in bodies] == [asked]
