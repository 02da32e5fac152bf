from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from minicluster.plan import Plan
from serving.api.metrics import Metrics
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget

DASHBOARD = Path(__file__).parents[3] / "monitoring" / "grafana" / "dashboards" / "minicluster.json"
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def _targets() -> list[tuple[str, str]]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


@pytest.fixture
def registry(plan: Plan) -> CollectorRegistry:
    return Metrics(
        compile_app(plan.deployment, DeployTarget(kind="cpu"), plan=plan).endpoint
    )._registry


def test_every_query_asks_for_what_is_exposed(registry: CollectorRegistry) -> None:
    """Each panel's metrics exist under that name (`make test-dashboard` asks a real Prometheus)."""
    names = {family.name + suffix for family in registry.collect() for suffix in SUFFIXES}
    for title, query in _targets():
        asked = set(re.findall(r"minicluster_\w+", query))
        assert asked, title
        assert asked <= names, title


PLANNED = re.compile(r"(minicluster_planned_seconds)\{(.*)\}")


def test_every_planned_value_that_is_asked_for_is_there(registry: CollectorRegistry) -> None:
    """With the labels that the query names: each measured phase has one beside it."""
    asked = [found for _, query in _targets() if (found := PLANNED.fullmatch(query))]
    for found in asked:
        labels = dict(re.findall(r'(\w+)="(\w+)"', found[2]))
        assert registry.get_sample_value(found[1], labels) is not None, labels
    of = {found[2].partition(",")[0] for found in asked}
    measured = ("ttft", "tpot", "itl", "e2e", "prefill_queue", "prefill", "handoff")
    assert of == {f'quantity="{name}"' for name in measured}
