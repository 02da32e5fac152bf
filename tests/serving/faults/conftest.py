"""The deployment for failures of one of several replicas: two prefill replicas, one decodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minicluster.plan import Placement
from tests.serving.deployed import Shared, Split, driven
from tests.serving.plans import make_deployment, make_pool

from .load import DEADLINE_S
from .spoiled import CROWDED


@pytest.fixture(scope="package")
def wide(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, shared: Shared
) -> Iterator[Split]:
    shared.end()
    # Two nodes with one core each, which is the same core: the second is for failures, not speed.
    nodes = (Placement(node="laptop", gpus=(0,)), Placement(node="second", gpus=(0,)))
    # Little KV cache: all of it has been used, and takes memory, soon after a start.
    prefill = make_pool("prefill", dtype="fp32", replicas=2, placement=nodes, kv_bytes=96e6)
    decode = make_pool("decode", (1,), dtype="fp32")
    deployment = make_deployment(demo_model, dtype="fp32", prefill=prefill, decode=decode)
    with driven(tmp_path_factory.mktemp("wide"), deployment, DEADLINE_S, **{CROWDED: "1"}) as found:
        yield found
