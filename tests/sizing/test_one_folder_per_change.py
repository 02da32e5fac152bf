"""A GPU, an engine version, a model or a routing policy is added in one folder (CONTRIBUTING)."""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from minicluster import routing
from minicluster.plan import read_plan
from minicluster.specs.scenario import SearchChoice
from sizing import catalog
from sizing.catalog import cluster, folder, gpu, model, scenario
from sizing.evidence.prediction import predict_row
from sizing.evidence.row import row_from
from sizing.planner.deployment import deployment
from sizing.simulation.planned import simulate_plan
from minicluster.workload.sources import drawn

from .scenarios import SMALL, found, inputs, proposed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .conftest import Sizing

CACHES = (
    cluster.clusters, cluster.switches, gpu.gpus, gpu.collectives, gpu._read_gpu, model.models,
    scenario.engines,
)  # fmt: skip
