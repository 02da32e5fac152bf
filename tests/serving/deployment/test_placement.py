"""A placement that `sizing place` made is the one that is deployed, and the one verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minicluster.plan import Plan, read_plan
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget
from serving.deployment.feasibility import missing_nodes
from sizing.cli.app import app

HOSTS = 6
"""In three racks of two; each, and so each HB domain, has 8 GPUs; the first is down."""


def sizing(*arguments: object) -> None:
    """Run a `sizing` command that must succeed."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan of 8B on H100, as it was first placed."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    sizing("plan", "llama-3.1-8b-h100", "--set", "search.pools=split", "-o", path)
    return path


@pytest.fixture(scope="module", params=["the cluster's nodes", "hosts by name"])
def placed(request: pytest.FixtureRequest, planned: Path) -> Plan:
    """Return the plan as `sizing place -o` wrote it."""
    out, hosts = planned.with_name("placed.json"), planned.with_name("hosts.toml")
    nodes = (
        f'[[nodes]]\nname = "gpu-host-{n}"\ngpus = 8\nstate = "{"ok" if n else "down"}"\n'
        f'units = {{hb = "host{n}"}}\n'
        for n in range(HOSTS)
    )
    hosts.write_text("".join(nodes), encoding="utf-8")
    listed = ("--inventory", hosts) if request.param == "hosts by name" else ()
    sizing("place", planned, *listed, "-o", out)
    return read_plan(out)


def test_a_plan_is_placed_without_being_changed_otherwise(placed: Plan, planned: Path) -> None:
    """Every replica has its GPUs; all but placement and nodes is the plan's."""
    before = read_plan(planned)
    for pool, first in zip(placed.pools, before.pools, strict=True):
        assert replace(pool, placement=first.placement) == first
    assert (placed.cost, placed.provenance) == (before.cost, before.provenance)
    cluster = placed.inputs.cluster
    named = {place.node for pool in placed.pools for place in pool.placement}
    hosts = {f"gpu-host-{n}" for n in range(1, HOSTS)}
    assert named <= (hosts if cluster.nodes else {f"node-{n}" for n in range(8)})
    # Hosts that a list names are HB domains as much as those that `sizing` numbers.
    assert len({cluster.hb_domain(node) for node in named} - {None}) == len(named)
    assert cluster.hb_domain("elsewhere") is None


def test_it_is_deployed_where_it_was_placed(placed: Plan) -> None:
    """Raylets, devices and replicas of what is compiled are the placement's."""
    served = compile_app(placed.deployment, DeployTarget(kind="gpu", one_host=False), plan=placed)
    wanted: dict[tuple[str, str], set[int]] = {}
    for pool in placed.pools:
        for place in pool.placement:
            wanted.setdefault((pool.role, place.node), set()).update(place.gpus)
    assert {(node.role, node.node): set(node.gpus) for node in served.nodes} == wanted
    for pool in placed.pools:
        assert sum(each.replicas for each in served.of(pool.role)) == pool.replicas
    labels = tuple(node.labels for node in served.nodes)
    assert not [*missing_nodes(placed.deployment, labels)]
