from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from minicluster.plan import NODE_LABEL, ROLE_LABEL
from serving.operations.status import Deployed
from serving.operations.verify import differences

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.conftest import DeploymentMaker


def _as_planned(model: Path) -> Deployed:
    """Return what two engines say that run as the demo's plan wants."""
    facts = {
        role: [
            {
                "tp": 1,
                "pp": 1,
                "max_num_seqs": batch,
                "max_num_batched_tokens": 2048,
                "chunked_prefill_tokens": 0,
                "gpu_memory_utilization": 0.9,
                "max_model_len": 2048,
                "block_size": 32,
                "kv_bytes": 268435456,
                "dtype": "bfloat16",
                "kv_dtype": "auto",
                "model": str(model),
                "kv_role": kv_role,
                "kv_connector": "NixlConnector",
                "labels": {ROLE_LABEL: role, NODE_LABEL: "laptop"},
                "cores": [[core]],
            }
        ]
        for role, batch, kv_role, core in (
            ("prefill", 4, "kv_producer", 0),
            ("decode", 16, "kv_consumer", 1),
        )
    }
    return Deployed(
        replicas={"prefill": 1, "decode": 1},
        status={"prefill": "HEALTHY", "decode": "HEALTHY"},
        facts=facts,
        answers=True,
    )


def test_as_planned(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """What runs as planned has no differences."""
    assert differences(make_deployment(small_model), _as_planned(small_model), "cpu") == ()


@pytest.mark.parametrize(
    ("fact", "value", "says"),
    [
        ("tp", 2, "decode[0].tp: deployed 2, planned 1"),
        ("max_num_seqs", 8, "decode[0].max_num_seqs: deployed 8, planned 16"),
        (
            "chunked_prefill_tokens",
            512,
            "chunked_prefill_tokens: deployed 512, planned 0",
        ),
        ("gpu_memory_utilization", 0.5, "decode[0].gpu_memory_utilization: deployed 0.5"),
        ("kv_bytes", 1, "decode[0].kv_bytes: deployed 1, planned 268435456"),
        ("dtype", "float32", "decode[0].dtype: deployed float32, planned bfloat16"),
        ("labels", {ROLE_LABEL: "decode", NODE_LABEL: "x"}, "decode.nodes: deployed ['x']"),
        ("labels", {ROLE_LABEL: "prefill", NODE_LABEL: "laptop"}, "decode.labels"),
        ("cores", [[0, 1]], "decode.cores: workers bound to [[[0, 1]]], planned [[[1]]]"),
    ],
)
def test_each_difference_is_named(
    small_model: Path, make_deployment: DeploymentMaker, fact: str, value: object, says: str
) -> None:
    """Any fact that is not as planned is reported with both values."""
    deployed = _as_planned(small_model)
    deployed.facts["decode"][0][fact] = value
    found = differences(make_deployment(small_model), deployed, "cpu")
    assert len(found) == 1
    assert says in found[0]


def test_limits_that_were_changed(small_model: Path, make_deployment: DeploymentMaker) -> None:
    """An option of Ray Serve that is not what was compiled is reported with both values."""
    options = {"decode": {"Decode:demo": {"max_ongoing_requests": 7}}}
    deployed = replace(_as_planned(small_model), options=options)
    bounds = {"decode": {"max_ongoing_requests": 20}}
    found = differences(make_deployment(small_model), deployed, "cpu", bounds)
    assert found == ("Decode:demo.max_ongoing_requests: deployed 7, planned 20",)


def test_a_missing_replica_is_a_difference(
    small_model: Path, make_deployment: DeploymentMaker
) -> None:
    """A replica that is gone is reported."""
    deployed = replace(_as_planned(small_model), replicas={"prefill": 1})
    found = differences(make_deployment(small_model), deployed, "cpu")
    assert "decode.replicas: deployed 0, planned 1" in found
