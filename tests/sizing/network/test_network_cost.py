"""What failures and the network cost a plan: spares, TP beyond the domain, KV between pools."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minicluster.errors import InputError
from minicluster.plan import Plan, read_plan
from sizing import catalog
from sizing.cli.app import app
from sizing.network.network_cost import crossing
from sizing.network.spares import availability_of
from sizing.planner.build_plan import build_plan
from sizing.planner.search import Found, search
from sizing.scenario import Scenario

SMALL = catalog.files("scenarios")["llama-3.1-8b-h100"]
LARGE = catalog.files("scenarios")["llama-3.1-70b-h100-2rps"]
FAILING = ("cluster.gpu_mtbf_s=1.8e8", "cluster.repair_s=86400")
SPARE = "search.spare_replicas=1"
AVAILABLE = "search.availability_fraction=0.999"
TIERS = ("--set", "cluster.preset=roce-24k", "--set", "cluster.max_gpus=64",
         "--set", "search.pools=split", "--set", "cluster.pools_meet_in=zone")  # fmt: skip


@cache
def answer() -> Found:
    found = search(Scenario.load(SMALL))
    assert isinstance(found, Found)
    return found


def with_keys(*overrides: str) -> Plan:
    """Write the answer of one search as a plan, spares and failures as *overrides* say."""
    return build_plan(Scenario.load(SMALL, list(overrides), None), answer())


def test_spare_replicas_reach_the_availability() -> None:
    """N+k by number, or from failures and repair (U4); the prediction does not count on them."""
    plain, one, spare = with_keys(), with_keys(SPARE), with_keys(*FAILING, AVAILABLE)
    assert plain.prediction == one.prediction == spare.prediction
    assert [pool.replicas - 1 for pool in one.pools] == [pool.replicas for pool in plain.pools]
    for pool in spare.pools:
        needed = plain.pool(pool.role).replicas
        assert pool.replicas == needed + pool.spare_replicas
        ratio = 86_400 / 1.8e8 * pool.gpus / pool.replicas
        assert availability_of(needed, pool.spare_replicas, ratio=ratio) >= 0.999**0.5
        assert availability_of(needed, pool.spare_replicas - 1, ratio=ratio) < 0.999**0.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((SPARE, AVAILABLE), "0 beside availability_fraction"),
        ((AVAILABLE,), "the failure rate of cluster"),
        (FAILING[:1], "repair_s"),
        (("cluster.preset=roce-24k", "cluster.pools_meet_in=region"), "one of"),
        (("cluster.pools_meet_in=pod",), "no such key without"),
    ],
)
def test_keys_that_contradict_or_lack_another_are_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        with_keys(*overrides)


@pytest.fixture(scope="module")
def zoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Plan on a cluster with tiers; return the file, and what `sizing plan -v` printed."""
    file = tmp_path_factory.mktemp("zoned") / "plan.json"
    done = CliRunner().invoke(app, ["plan", str(LARGE), "-v", *TIERS, "-o", str(file)])
    assert done.exit_code == 0
    return file, done.stdout


def test_crossing_costs_what_its_tier_costs(zoned: tuple[Path, str]) -> None:
    """A pull alone takes the same everywhere, and 7 times as long while the whole pod sends."""
    plan = read_plan(zoned[0])
    found = crossing(plan)
    rack, pod, zone = found.transfers
    assert [each.tier for each in found.transfers if each.planned] == ["zone"]
    assert 0 < rack.seconds == pod.seconds == zone.seconds == pod.all_sending_s
    assert zone.all_sending_s / zone.seconds == pytest.approx(7, rel=0.05)
    assert [each.role for each in found.wide] == ["prefill", "decode"]
    assert found.wide[0].now_s > 2 * found.wide[1].now_s  # a prompt, and one token of a batch
    for each in found.wide:
        assert each.tp == 16
        assert 1e-3 < each.beyond_s < each.step_s

    one_domain = replace(plan.inputs.cluster, max_gpus=8)
    alone = crossing(replace(plan, inputs=replace(plan.inputs, cluster=one_domain)))
    assert (alone.transfers, alone.wide) == ((), ())
