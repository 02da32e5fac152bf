"""What failures and the network cost a plan: spares, TP beyond the domain, KV between pools."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from minicluster.errors import InputError
from minicluster.plan import to_json
from sizing import catalog
from sizing.cli.app import app
from sizing.cli.common import read_inputs
from sizing.network.network_cost import crossing
from sizing.network.spares import availability_of
from sizing.planner.build_plan import build_plan
from sizing.planner.search import Found, search
from sizing.planner.studies.loss import losses

if TYPE_CHECKING:
    from pathlib import Path

    from minicluster.plan import Plan

SMALL = catalog.files("scenarios")["llama-3.1-8b-h100"]
LARGE = catalog.files("scenarios")["llama-3.1-70b-h100-2rps"]


@cache
def planned(*overrides: str, scenario: Path = SMALL) -> Plan:
    inputs = read_inputs(scenario, list(overrides), None)
    answer = search(inputs)
    assert isinstance(answer, Found)
    return build_plan(inputs, answer)


def test_spare_replicas_reach_the_availability() -> None:
    """N+k from failures and repair (U4); the prediction does not count on the spares."""
    failing = ("cluster.gpu_mtbf_s=1.8e8", "cluster.repair_s=86400")
    plain, spare = planned(*failing), planned(*failing, "search.availability_fraction=0.999")
    for pool in spare.pools:
        needed = plain.pool(pool.role).replicas
        assert pool.replicas == needed + pool.spare_replicas
        ratio = 86_400 / 1.8e8 * pool.gpus / pool.replicas
        assert availability_of(needed, pool.spare_replicas, ratio=ratio) >= 0.999**0.5
        assert availability_of(needed, pool.spare_replicas - 1, ratio=ratio) < 0.999**0.5
    assert spare.prediction == plain.prediction


def test_with_a_spare_the_loss_of_a_replica_breaks_nothing() -> None:
    """N+1 asked for by number: what is left of each pool after a loss is what the SLO needs."""
    plain, spare = planned(), planned("search.spare_replicas=1")
    assert [pool.replicas - 1 for pool in spare.pools] == [pool.replicas for pool in plain.pools]
    assert spare.prediction == plain.prediction
    assert not all(each.holds for each in losses(plain, requests=4000, seed=0))
    assert all(each.holds for each in losses(spare, requests=4000, seed=0))


ZONES = ("cluster.preset=roce-24k", "cluster.max_gpus=64", "search.pools=split")
SPARE = "search.spare_replicas=1"
AVAILABLE = "search.availability_fraction=0.999"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((SPARE, AVAILABLE), "0 beside availability_fraction"),
        ((AVAILABLE,), "the failure rate of cluster"),
        (("cluster.gpu_mtbf_s=1.8e8",), "repair_s"),
        ((*ZONES, "cluster.pools_meet_in=region"), "one of"),
        (("cluster.pools_meet_in=pod",), "no such key without"),
    ],
)
def test_keys_that_contradict_or_lack_another_are_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        planned(*overrides)


def zoned(*overrides: str) -> Plan:
    return planned(*ZONES, *overrides, scenario=LARGE)


def test_pools_that_meet_further_out_pull_longer() -> None:
    """The plan's KV pull pays the whole 7:1 of the zone, and nothing within a pod."""
    near, far = (zoned(f"cluster.pools_meet_in={tier}") for tier in ("pod", "zone"))
    times = [{each.tier: each.seconds for each in crossing(plan).transfers} for plan in (near, far)]
    assert times[0] == times[1]
    assert times[0]["rack"] == times[0]["pod"]
    zone = next(each for each in crossing(far).transfers if each.tier == "zone")
    assert zone.planned
    assert zone.seconds / zone.without_oversubscription_s == pytest.approx(7, rel=0.05)
    assert far.prediction.ttft.mean_s > near.prediction.ttft.mean_s


def test_tp_beyond_the_domain_costs_milliseconds() -> None:
    wide = crossing(zoned()).wide
    assert [each.role for each in wide] == ["prefill", "decode"]
    assert wide[0].now_s > 2 * wide[1].now_s  # a prompt, and one token of a batch
    for each in wide:
        assert each.tp == 16
        assert 1e-3 < each.beyond_s < each.step_s


def test_one_domain_crosses_nothing() -> None:
    alone = crossing(planned("cluster.max_gpus=8", "workload.requests_per_s=0.2"))
    assert (alone.transfers, alone.wide) == ((), ())


def test_placing_prints_what_crossing_costs(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(to_json(zoned("cluster.pools_meet_in=zone")))
    told = CliRunner().invoke(app, ["place", str(file)])
    assert "at 7:1" in told.stdout
    assert "for leaving the HB domain" in told.stdout
    found = json.loads(CliRunner().invoke(app, ["place", str(file), "--json"]).stdout)
    assert [each["tier"] for each in found["crossing"]["transfers"]] == ["rack", "pod", "zone"]


def test_planning_on_tiers_prints_what_crossing_costs() -> None:
    """`sizing plan -v` on a cluster with tiers ends with KV by tier and TP beyond the domain."""
    overrides = [word for key in (*ZONES, "cluster.pools_meet_in=zone") for word in ("--set", key)]
    told = CliRunner().invoke(app, ["plan", str(LARGE), "-v", *overrides])
    assert told.exit_code == 0
    assert "meet in zone" in told.stdout
    assert "TP16 in decode" in told.stdout
