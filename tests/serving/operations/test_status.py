"""What `serving verify` says of pools that are not there, or do not answer."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.errors import NegativeAnswer
from minicluster.plan import to_json
from serving.cli import inspect
from serving.cluster import connection
from serving.operations import status

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray import serve

    from serving.cluster import serve_compat
from tests.serving.plans import make_deployment

if TYPE_CHECKING:
    from pathlib import Path


RUNNING = {"Prefill:demo": 0, "Decode:demo": 1}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have a cluster with no prefill replica, and one decode replica that says nothing."""
    deployments = {
        name: SimpleNamespace(
            replica_states={"RUNNING": number} if number else {"STARTING": 1},
            status=SimpleNamespace(value="HEALTHY" if number else "UNHEALTHY"),
        )
        for name, number in RUNNING.items()
    }
    app = SimpleNamespace(deployments=deployments)
    asked: list[str] = []

    def handle(name: str, _app: str) -> Any:  # noqa: ANN401
        def result(*, timeout_s: float) -> None:
            assert timeout_s > 0
            asked.append(name)
            raise TimeoutError

        response = SimpleNamespace(result=result, cancel=lambda: asked.append("no more"))
        return SimpleNamespace(facts=SimpleNamespace(remote=lambda: response))

    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={status.APP: app}))
    monkeypatch.setattr(serve, "get_deployment_handle", handle)
    monkeypatch.setattr(connection, "connected", lambda _address: nullcontext())
    monkeypatch.setattr(
        serve_compat, "deployment_options", lambda _app: {name: {} for name in RUNNING}
    )
    monkeypatch.setattr(status, "_answers", lambda _url: True)
    return asked


def test_verify_lists_what_does_not_run_or_answer(
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_model: Path,
) -> None:
    """Pools without replicas are not queried, silence is a difference, and the exit code is 3."""
    file = tmp_path / "deployment.json"
    file.write_text(to_json(make_deployment(small_model)))
    state: Any = SimpleNamespace(
        plan=str(file),
        deployment=str(file),
        target="cpu",
        planned=False,
        changes=(),
        address="",
        base_url="",
        deadlines_s=(None, None),
        token_limit=None,
    )
    monkeypatch.setattr(inspect, "current", lambda: state)
    with pytest.raises(NegativeAnswer) as negative:
        inspect.verify(as_json=True)
    assert negative.value.exit_code == 3
    found = json.loads(capsys.readouterr().out)["differences"]
    assert "prefill.replicas: deployed 0, planned 1" in found
    assert "Decode:demo.facts: not reported within 30 s, so not compared" in found
    assert not any(
        each.startswith("decode.") for each in found
    )  # unreported settings are no differences
    assert asked == ["Decode:demo", "no more"]
