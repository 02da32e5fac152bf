"""The deployment for failures of one of several replicas: two prefill replicas, one decodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import Placement
from tests.serving.deployed import Shared, Split, driven, up
from tests.serving.plans import make_deployment, make_pool

from .load import DEADLINE_S
from .spoiled import CROWDED

if TYPE_CHECKING:
    from collections.abc import Iterator


SPOILED = Path(__file__).parent / "spoiled.py"


@pytest.fixture(scope="package")
def wide(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, shared: Shared
) -> Iterator[Split]:
    shared.end()
    place = tmp_path_factory.mktemp("wide")
    # Two nodes with one core each, which is the same core: the second is for failures, not speed.
    nodes = (Placement(node="laptop", gpus=(0,)), Placement(node="second", gpus=(0,)))
    # Little KV cache: all of it has been used, and takes memory, soon after a start.
    prefill = make_pool("prefill", dtype="fp32", replicas=2, placement=nodes, kv_bytes=96e6)
    decode = make_pool("decode", (1,), dtype="fp32")
    deployment = make_deployment(demo_model, dtype="fp32", prefill=prefill, decode=decode)
    replicas = {"prefill": 2, "decode": 1}
    deadlines = ("--prefill-deadline", str(DEADLINE_S), "--kv-deadline", str(DEADLINE_S))
    spoiled = (sys.executable, str(SPOILED))
    with (
        up(place, deployment, *deadlines, command=spoiled, **{CROWDED: "1"}) as base_url,
        driven(place, base_url, replicas=replicas, deadline_s=DEADLINE_S) as found,
    ):
        yield found
