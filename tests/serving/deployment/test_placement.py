"""A placement that `sizing place` made is the one that is deployed, and the one verified."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from minicluster.plan import NODE_LABEL, ROLE_LABEL, Plan, read_plan
from serving.deployment.compile import compile_app, ray_nodes, replica_places
from serving.deployment.engine_args import DTYPES, KV_ROLES, DeployTarget
from serving.deployment.feasibility import missing_nodes
from serving.operations.status import Deployed
from serving.operations.verify import differences
from sizing.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

    from minicluster.plan import Pool

SPLIT = ("--set", "search.pools=split")
RACKS = 3
"""Of two nodes; each node, and so each HB domain, has 8 GPUs."""


def sizing(*arguments: str) -> str:
    """Run a `sizing` command that must succeed."""
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan of 8B on H100, as it was first placed."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    sizing("plan", "llama-3.1-8b-h100", *SPLIT, "-o", str(path))
    return path


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a list of hosts by their own names, the first of them down."""
    path = tmp_path_factory.mktemp("site") / "hosts.toml"
    states = ("down", *("ok",) * (2 * RACKS - 1))
    path.write_text(
        "".join(
            f'[[nodes]]\nname = "gpu-host-{n}"\ngpus = 8\nstate = "{state}"\n'
            f'units = {{hb = "host{n}"}}\n'
            for n, state in enumerate(states)
        ),
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module", params=["the cluster's nodes", "hosts by name"])
def placed(request: pytest.FixtureRequest, planned: Path, hosts: Path) -> Plan:
    """Return the plan as `sizing place -o` wrote it."""
    listed = () if request.param == "the cluster's nodes" else ("--inventory", str(hosts))
    out = planned.with_name(f"placed-{len(listed)}.json")
    sizing("place", str(planned), *listed, "-o", str(out))
    return read_plan(out)


def test_a_plan_is_placed_without_being_changed_otherwise(placed: Plan, planned: Path) -> None:
    """Every replica has its GPUs; all but placement and nodes is the plan's."""
    before = json.loads(planned.read_text(encoding="utf-8"))
    for pool, first in zip(placed.pools, read_plan(planned).pools, strict=True):
        assert pool.gpus == first.gpus
        assert [len(places) for places in replica_places(pool)] == [
            len(places) for places in replica_places(first)
        ]
    assert placed.cost.gpus == before["cost"]["gpus"]
    assert placed.provenance.inputs_hash == before["provenance"]["inputs_hash"]
    named = {place.node for pool in placed.pools for place in pool.placement}
    if placed.inputs.cluster.nodes:
        assert named <= {f"gpu-host-{n}" for n in range(1, 2 * RACKS)}
    else:
        assert named <= {f"node-{n}" for n in range(8)}


def test_it_is_deployed_where_it_was_placed(placed: Plan) -> None:
    """Raylets, labels and devices of what is compiled are the placement's."""
    served = compile_app(placed.deployment, DeployTarget(kind="gpu", one_host=False), plan=placed)
    wanted: dict[tuple[str, str], set[int]] = {}
    for pool in placed.pools:
        for place in pool.placement:
            wanted.setdefault((pool.role, place.node), set()).update(place.gpus)
    assert {(node.role, node.node): set(node.gpus) for node in served.nodes} == wanted
    assert [node.labels for node in served.nodes] == [
        {ROLE_LABEL: node.role, NODE_LABEL: node.node} for node in served.nodes
    ]
    for pool in placed.pools:
        deployments = served.of(pool.role)
        assert sum(each.replicas for each in deployments) == pool.replicas
        nodes: set[str] = set()
        for each in deployments:
            (selector,) = each.llm_config["deployment_config"][
                "placement_group_bundle_label_selector"
            ]
            assert selector[ROLE_LABEL] == pool.role
            nodes |= set(selector[NODE_LABEL].removeprefix("in(").removesuffix(")").split(","))
        assert nodes >= {place.node for place in pool.placement}
    labels = tuple(node.labels for node in served.nodes)
    assert not [*missing_nodes(placed.deployment, labels)]


def test_verify_finds_it_as_planned(placed: Plan) -> None:
    """Engines on the compiled nodes have no difference; one on another node has one."""
    deployed = Deployed(
        replicas={pool.role: pool.replicas for pool in placed.pools},
        status={pool.role: "HEALTHY" for pool in placed.pools},
        facts={pool.role: [*_facts(placed, pool)] for pool in placed.pools},
        answers=True,
    )
    assert differences(placed.deployment, deployed, "gpu") == ()
    deployed.facts["decode"][0]["labels"] = {ROLE_LABEL: "decode", NODE_LABEL: "elsewhere"}
    (found,) = differences(placed.deployment, deployed, "gpu")
    assert found.startswith("decode.nodes: deployed ")


def _facts(plan: Plan, pool: Pool) -> list[dict[str, object]]:
    """Return what the engines of a pool say of themselves, on the raylets that were compiled."""
    raylets = {(node.role, node.node): node for node in ray_nodes(plan.deployment, "gpu")}
    return [
        {
            "tp": pool.tp,
            "pp": pool.pp,
            "max_num_seqs": pool.max_num_seqs,
            "max_num_batched_tokens": pool.max_num_batched_tokens,
            "max_model_len": plan.engine.max_model_len,
            "block_size": plan.engine.block_size,
            "kv_bytes": int(pool.kv_bytes),
            "dtype": DTYPES[pool.dtype],
            "kv_dtype": "auto",
            "model": plan.model.source,
            "kv_role": KV_ROLES[pool.role],
            "kv_connector": "NixlConnector",
            "labels": raylets[pool.role, places[0][0]].labels,
        }
        for places in replica_places(pool)
    ]


def test_domains_are_those_of_the_hosts(placed: Plan) -> None:
    """Hosts that a list names are HB domains as much as those that `sizing` numbers."""
    cluster = placed.inputs.cluster
    nodes = sorted({place.node for pool in placed.pools for place in pool.placement})
    found = [cluster.hb_domain(node) for node in nodes]
    assert None not in found
    assert len(set(found)) == len(nodes)
    assert cluster.hb_domain("elsewhere") is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cluster", "dgx-h100"), "the plan was made for its own cluster"),
        (("--tp", "8", "--cluster", "dgx-h100"), "a plan, or --tp"),
    ],
)
def test_what_is_not_written(planned: Path, arguments: tuple[str, ...], says: str) -> None:
    """A placement goes into the plan of its own cluster only."""
    out = planned.with_name("no.json")
    done = CliRunner().invoke(app, ["place", str(planned), *arguments, "-o", str(out)])
    assert done.exit_code != 0
    assert says in str(done.exception)
    assert not out.exists()
