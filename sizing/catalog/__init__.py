"""The catalogs in `configs/`: names to facts, and a scenario to everything it names."""

from sizing.catalog.cluster import clusters as clusters
from sizing.catalog.cluster import find_cluster as find_cluster
from sizing.catalog.cluster import find_network as find_network
from sizing.catalog.cluster import read_cluster as read_cluster
from sizing.catalog.cluster import switches as switches
from sizing.catalog.engine import engines as engines
from sizing.catalog.engine import find_engine as find_engine
from sizing.catalog.engine import release as release
from sizing.catalog.folder import configs as configs
from sizing.catalog.folder import files as files
from sizing.catalog.folder import find_profile as find_profile
from sizing.catalog.gpu import GpuEntry as GpuEntry
from sizing.catalog.gpu import collectives as collectives
from sizing.catalog.gpu import find_gpu as find_gpu
from sizing.catalog.gpu import gpu_generation as gpu_generation
from sizing.catalog.gpu import gpus as gpus
from sizing.catalog.gpu import price_lists as price_lists
from sizing.catalog.model import DEMO_MODEL as DEMO_MODEL
from sizing.catalog.model import ModelEntry as ModelEntry
from sizing.catalog.model import find_model as find_model
from sizing.catalog.model import model_family as model_family
from sizing.catalog.model import models as models
from sizing.catalog.scenario import check_draft as check_draft
from sizing.catalog.scenario import inputs_of as inputs_of
from sizing.catalog.scenario import read_scenario as read_scenario
from sizing.catalog.scenario import with_keys as with_keys
