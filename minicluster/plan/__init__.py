"""The plan: the only thing that serving and loadtest know of sizing."""

from minicluster.plan.deployment import (
    NODE_LABEL,
    ROLE_LABEL,
    Deployment,
    EngineSettings,
    Placement,
    Pool,
    Routing,
)
from minicluster.plan.document import (
    SCHEMA_VERSION,
    Plan,
    Provenance,
    plan_from,
    read_deployment,
    read_plan,
    read_plan_or_deployment,
    to_json,
)
from minicluster.plan.inputs import Inputs
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
    "NODE_LABEL",
    "ROLE_LABEL",
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
