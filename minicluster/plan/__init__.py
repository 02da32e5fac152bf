"""The plan: the only thing that serving and loadtest know of sizing."""

from minicluster.plan.deployment import NODE_LABEL as NODE_LABEL
from minicluster.plan.deployment import ROLE_LABEL as ROLE_LABEL
from minicluster.plan.deployment import Deployment as Deployment
from minicluster.plan.deployment import EngineSettings as EngineSettings
from minicluster.plan.deployment import Placement as Placement
from minicluster.plan.deployment import Pool as Pool
from minicluster.plan.deployment import Routing as Routing
from minicluster.plan.document import SCHEMA_VERSION as SCHEMA_VERSION
from minicluster.plan.document import Inputs as Inputs
from minicluster.plan.document import Plan as Plan
from minicluster.plan.document import Provenance as Provenance
from minicluster.plan.document import plan_from as plan_from
from minicluster.plan.document import read_deployment as read_deployment
from minicluster.plan.document import read_plan as read_plan
from minicluster.plan.document import read_plan_or_deployment as read_plan_or_deployment
from minicluster.plan.document import to_json as to_json
from minicluster.plan.prediction import CalibrationNote as CalibrationNote
from minicluster.plan.prediction import ClassPrediction as ClassPrediction
from minicluster.plan.prediction import Confidence as Confidence
from minicluster.plan.prediction import Cost as Cost
from minicluster.plan.prediction import Deployable as Deployable
from minicluster.plan.prediction import Headroom as Headroom
from minicluster.plan.prediction import Latency as Latency
from minicluster.plan.prediction import Prediction as Prediction
from minicluster.plan.prediction import StepModel as StepModel
from minicluster.plan.prediction import Validation as Validation
