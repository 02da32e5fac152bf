"""
How many GPUs, and which layout, meet a latency SLO.

    import sizing

    chat = sizing.Scenario.load("llama-3.1-70b-h100", {"workload.requests_per_s": 50})
    plan = sizing.plan(chat)

Every name is imported when it is first used. Results show themselves in a notebook, and
`to_frame()` makes a pandas frame of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minicluster.plan import Plan as Plan
    from minicluster.plan import read_plan as read_plan
    from minicluster.workload.day_profile import read_profile as read_profile
    from minicluster.workload.sources import RequestSource as RequestSource
    from minicluster.workload.traces import read_trace as read_trace
    from sizing.evidence.validate import validate as validate
    from sizing.planner.explanation import explain_plan as explain_plan
    from sizing.planner.plan import NoPlan as NoPlan
    from sizing.planner.plan import plan as plan
    from sizing.planner.plan import plan_classes as plan_classes
    from sizing.planner.predict import predict as predict
    from sizing.planner.studies.capacity import capacity as capacity
    from sizing.planner.studies.day import DayOptions as DayOptions
    from sizing.planner.studies.day import day as day
    from sizing.planner.studies.decisions import decisions as decisions
    from sizing.planner.studies.grid import Swept as Swept
    from sizing.planner.studies.split_map import split_map as split_map
    from sizing.scenario import Scenario as Scenario
    from sizing.simulation.planned import simulate as simulate

_HOMES = {
    "DayOptions": "sizing.planner.studies.day",
    "NoPlan": "sizing.planner.plan",
    "Plan": "minicluster.plan",
    "RequestSource": "minicluster.workload.sources",
    "Scenario": "sizing.scenario",
    "Swept": "sizing.planner.studies.grid",
    "capacity": "sizing.planner.studies.capacity",
    "day": "sizing.planner.studies.day",
    "decisions": "sizing.planner.studies.decisions",
    "explain_plan": "sizing.planner.explanation",
    "plan": "sizing.planner.plan",
    "plan_classes": "sizing.planner.plan",
    "predict": "sizing.planner.predict",
    "read_plan": "minicluster.plan",
    "read_profile": "minicluster.workload.day_profile",
    "read_trace": "minicluster.workload.traces",
    "simulate": "sizing.simulation.planned",
    "split_map": "sizing.planner.studies.split_map",
    "validate": "sizing.evidence.validate",
}
"""Module of each public name: commands start fast because none is imported before it is used."""

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name, and how notebooks show results."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sizing' has no attribute {name!r}")
    import_module("sizing.report.shown")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(_HOMES)
