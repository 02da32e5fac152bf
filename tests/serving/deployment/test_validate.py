from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.engine_model.kv_cache import kv_bytes_per_sequence
from minicluster.plan import NODE_LABEL, ROLE_LABEL, Placement
from serving.deployment.feasibility import findings

if TYPE_CHECKING:
    from pathlib import Path

    from serving.deployment.target import Target
    from tests.serving.conftest import DeploymentMaker, PoolMaker

Change = "Callable[[Deployment], Deployment]"


def test_a_plan_that_fits_has_no_findings(
    small_model: Path, make_deployment: DeploymentMaker, target: Target
) -> None:
    """The demo's deployment can be realised on two cores."""
    assert findings(make_deployment(small_model), target) == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"system": "Darwin arm64"}, "platform: this is Darwin arm64"),
        ({"ray": None}, "ray: not installed"),
        ({"vllm": "0.33.0"}, "engine.version: the plan wants vllm 0.29.0, here is 0.33.0"),
        ({"cores": frozenset({0})}, "placement: cores [1]; this machine has [0]"),
        ({"memory_bytes": 10**9}, "memory: about"),
        ({"labels": ()}, "no node of the cluster is labelled minicluster-role=prefill"),
    ],
)
def test_target_that_lacks_something(
    small_model: Path,
    make_deployment: DeploymentMaker,
    target: Target,
    change: dict[str, Any],
    says: str,
) -> None:
    """What the machine lacks is named."""
    found = findings(make_deployment(small_model), replace(target, **change))
    assert any(says in finding for finding in found), found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pp": 2, "placement": (Placement(node="n", gpus=(1, 2)),)}, "pp 1 only"),
        (
            {"tp": 2, "ep": 2, "placement": (Placement(node="n", gpus=(1, 2)),)},
            "serving deploys ep 1",
        ),
        (
            {"tp": 3, "placement": (Placement(node="n", gpus=(1, 2, 3)),)},
            "tp: 3; expected a divisor of the model's 8 attention heads",
        ),
        ({"dtype": "int4"}, "dtype: int4; on a cpu one of"),
        ({"dtype": "fp32"}, "a KV cache has one dtype"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "at least max_num_seqs = 64"),
        ({"kv_bytes": 1e5}, "one sequence of 2048 tokens"),
        ({"placement": (Placement(node="my node", gpus=(1,)),)}, "is no node label"),
        ({"placement": (Placement(node="n", gpus=(0,)),)}, "all nodes are this machine"),
    ],
)
def test_decode_pool_that_cannot_be(
    small_model: Path,
    make_deployment: DeploymentMaker,
    make_pool: PoolMaker,
    target: Target,
    change: dict[str, Any],
    says: str,
) -> None:
    """What the engine cannot do is named, pool and value included."""
    decode = make_pool("decode", (1,), **change)
    found = findings(make_deployment(small_model, decode=decode), target)
    assert any(says in finding for finding in found), found


def test_tp_must_nest_between_pools(
    small_model: Path, make_deployment: DeploymentMaker, make_pool: PoolMaker, target: Target
) -> None:
    """NIXL cannot transfer between TP degrees that do not divide one another."""
    prefill = make_pool("prefill", tp=2, placement=(Placement(node="n", gpus=(0, 1)),))
    decode = make_pool("decode", tp=3, placement=(Placement(node="n", gpus=(2, 3, 4)),))
    found = findings(make_deployment(small_model, prefill=prefill, decode=decode), target)
    assert any("one is a multiple of the other" in finding for finding in found)


def test_a_window_of_attention_needs_less_cache(
    small_model: Path, make_deployment: DeploymentMaker, target: Target
) -> None:
    """What the planner says that a sequence needs is enough, layers with a window included."""
    whole = make_deployment(small_model)
    model = replace(whole.model, num_window_layers=1, window_tokens=64)
    needed = kv_bytes_per_sequence(model, whole.engine.max_model_len, block_size=32)
    pools = tuple(replace(pool, kv_bytes=needed) for pool in whole.pools)
    assert any("one sequence" in each for each in findings(replace(whole, pools=pools), target))
    assert findings(replace(whole, model=model, pools=pools), target) == ()


def test_a_chunk_beyond_the_context(
    small_model: Path, make_deployment: DeploymentMaker, target: Target
) -> None:
    """VLLM refuses to start with one, so that serving does before."""
    plain = make_deployment(small_model)
    limited = replace(plain, engine=replace(plain.engine, chunked_prefill_tokens=4096))
    assert any("chunked_prefill_tokens: 4096" in each for each in findings(limited, target))


def test_every_reason_at_once(
    small_model: Path, make_deployment: DeploymentMaker, make_pool: PoolMaker, target: Target
) -> None:
    """All reasons come together, not one a run."""
    decode = make_pool("decode", (7, 8), tp=2, ep=2, kv_bytes=1.0)
    found = findings(make_deployment(small_model, decode=decode), replace(target, ray="1.0"))
    assert len(found) == 4


def test_only_one_mixed_pool(
    small_model: Path, make_deployment: DeploymentMaker, make_pool: PoolMaker, target: Target
) -> None:
    """A pool that does both phases can be deployed; a second one, or one beside it, cannot."""
    deployment = replace(make_deployment(small_model), pools=(make_pool("mixed"),))
    assert findings(deployment, target) == ()
    deployment = replace(deployment, pools=(make_pool("mixed"), make_pool("decode", (1,))))
    assert "one prefill and one decode pool, or a mixed one" in findings(deployment, target)[0]


def test_model_that_changed_since_the_plan(
    tmp_path: Path, small_model: Path, make_deployment: DeploymentMaker, target: Target
) -> None:
    """Another architecture, no weights or no model at all are told apart."""
    deployment = make_deployment(small_model)
    config = json.loads((small_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 99}))
    moved = replace(deployment, model=replace(deployment.model, source=str(tmp_path)))
    found = " | ".join(findings(moved, target))
    assert "the plan was made for" in found
    assert "holds no weights" in found
    gone = replace(deployment, model=replace(deployment.model, source=str(tmp_path / "gone")))
    assert "No such file" in findings(gone, target)[0]


def test_labelled_cluster_is_enough(
    small_model: Path, make_deployment: DeploymentMaker, target: Target
) -> None:
    """An existing cluster with labelled nodes is taken, whatever this machine has."""
    labels = tuple({ROLE_LABEL: role, NODE_LABEL: "laptop"} for role in ("prefill", "decode"))
    elsewhere = replace(target, labels=labels, cores=frozenset(), memory_bytes=0)
    assert findings(make_deployment(small_model), elsewhere) == ()
