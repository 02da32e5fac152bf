from __future__ import annotations

import json
import re
from pathlib import Path

from minicluster.plan import Plan
from serving.api.gate import Metrics
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget

DASHBOARD = Path(__file__).parents[3] / "monitoring" / "grafana" / "dashboards" / "minicluster.json"
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


PLANNED = re.compile(r"(minicluster_planned_seconds)\{(.*)\}")
MEASURED = {"ttft", "tpot", "itl", "e2e", "prefill_queue", "prefill", "handoff"}


def test_every_query_asks_for_what_is_exposed(plan: Plan) -> None:
    """
    Each panel's metrics exist under that name (test_simulated_cluster.py asks a real Prometheus).

    Each measured phase has a planned value beside it, with the labels that the query names.
    """
    target = DeployTarget(kind="cpu")
    registry = Metrics(compile_app(plan.deployment, target, plan=plan).endpoint)._registry
    names = {family.name + suffix for family in registry.collect() for suffix in SUFFIXES}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    planned = set()
    for query in (target["expr"] for panel in panels for target in panel["targets"]):
        asked = set(re.findall(r"minicluster_\w+", query))
        assert asked, query
        assert asked <= names, query
        if found := PLANNED.fullmatch(query):
            labels = dict(re.findall(r'(\w+)="(\w+)"', found[2]))
            assert registry.get_sample_value(found[1], labels) is not None, labels
            planned.add(labels["quantity"])
    assert planned == MEASURED
