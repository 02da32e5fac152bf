"""Replicas that a gate finds without Ray Serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .gates import HERE, Replicas


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    """Return replicas that are found as those of Ray Serve."""
    found = Replicas()
    gate, watch = "serving.replicas.gate_server", "serving.replicas.seats"
    context = SimpleNamespace(app_name="a", rank=SimpleNamespace(rank=0))
    monkeypatch.setattr(f"{gate}.serve.get_replica_context", lambda: context)
    monkeypatch.setattr(
        f"{gate}.serve.get_deployment_handle", lambda name, _app: SimpleNamespace(name=name)
    )
    monkeypatch.setattr(f"{gate}.ray.util.get_node_ip_address", lambda: HERE)
    monkeypatch.setattr(f"{gate}.keep_log_open", lambda: None)
    monkeypatch.setattr(f"{gate}.before_sigterm", lambda _wait: None)
    monkeypatch.setattr(f"{watch}.live_replica_ids", found.live)
    monkeypatch.setattr(f"{watch}.places_of_replica", found.places)
    return found
