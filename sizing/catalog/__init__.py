"""The catalogs in `configs/`: names to facts, and a scenario to everything it names."""

from sizing.catalog.cluster import clusters, find_cluster, find_network, read_cluster, switches
from sizing.catalog.engine import engines, find_engine, release
from sizing.catalog.folder import configs, files
from sizing.catalog.gpu import GpuEntry, collectives, find_gpu, gpus
from sizing.catalog.model import DEMO_MODEL, ModelEntry, find_model, models
from sizing.catalog.scenario import Resolved, find_study, read_scenario, resolve

__all__ = [
    "DEMO_MODEL",
    "GpuEntry",
    "ModelEntry",
    "Resolved",
    "clusters",
    "collectives",
    "configs",
    "engines",
    "files",
    "find_cluster",
    "find_engine",
    "find_gpu",
    "find_model",
    "find_network",
    "find_study",
    "gpus",
    "models",
    "read_cluster",
    "read_scenario",
    "release",
    "resolve",
    "switches",
]
