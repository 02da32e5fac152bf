"""The plan: the only thing that serving and loadtest know of sizing."""

from minicluster.plan.deployment import (
    Deployment,
    EngineSettings,
    Placement,
    PlanModel,
    Pool,
    Routing,
)
from minicluster.plan.document import (
    SCHEMA_VERSION,
    Inputs,
    Plan,
    Provenance,
    plan_from,
    read_deployment,
    read_plan,
    read_plan_or_deployment,
    to_json,
)
from minicluster.plan.prediction import (
    CalibrationNote,
    Confidence,
    Cost,
    Deployable,
    Headroom,
    Latency,
    Prediction,
    StepModel,
    Validation,
)

__all__ = [
    "SCHEMA_VERSION",
    "CalibrationNote",
    "Confidence",
    "Cost",
    "Deployable",
    "Deployment",
    "EngineSettings",
    "Headroom",
    "Inputs",
    "Latency",
    "Placement",
    "Plan",
    "PlanModel",
    "Pool",
    "Prediction",
    "Provenance",
    "Routing",
    "StepModel",
    "Validation",
    "plan_from",
    "read_deployment",
    "read_plan",
    "read_plan_or_deployment",
    "to_json",
]
