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
from sizing.latency.op import decode_load
from sizing.latency.step import step_s
from sizing.latency.term import Machine
from sizing.network.network_cost import crossing, mean_prompt_tokens
from sizing.network.spares import availability_of
from sizing.planner.layout import Layout
from sizing.planner.plan import build_plan
from sizing.planner.predict import predict
from sizing.planner.search import search
from sizing.planner.simulated_check import Found
from sizing.planner.step_models import StepModels
from sizing.scenario import Scenario
from tests.sizing.scenarios import LARGE as BUSY
from tests.sizing.scenarios import inputs

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
    assert not found.wide  # its groups stay inside their domains

    one_domain = replace(plan.inputs.cluster, max_gpus=8)
    alone = crossing(replace(plan, inputs=replace(plan.inputs, cluster=one_domain)))
    assert (alone.transfers, alone.wide) == ((), ())


def test_groups_over_domains_pay_and_share_nics_with_pulls() -> None:
    """Pulls hold a NIC for lambda n a / ranks of the time, and exchanges take that much longer."""
    sizes = {"prefill": "6xTP8", "decode": "2xTP16"}
    given = inputs(replace(BUSY, search=replace(BUSY.search, layouts="any")))
    load = given.scenario.workload
    wide = predict(given, **sizes)
    [found] = wide.spanning
    assert found.role == "decode"
    assert found.beyond_s > 1e-3
    tokens = mean_prompt_tokens(load)
    path = StepModels(given).of(Layout.split(8, 16, "h100-sxm")).path
    pulls_s = load.requests_per_s * tokens * path.transfer_per_token_s
    assert found.pulling_fraction == pytest.approx(pulls_s / 2)
    exchanges_s = found.shared_s / found.pulling_fraction
    assert exchanges_s > found.beyond_s
    decode = wide.pools[-1]
    full = decode_load(decode.max_num_seqs, tokens)
    whole_s = float(step_s(Machine.of(given), full, slicing=decode.slicing))
    assert found.pulls_longer_fraction == pytest.approx(exchanges_s / whole_s)
    assert predict(given, prefill="6xTP8", decode="2xTP8").spanning == ()
    [alone] = predict(given, mixed="8xTP16").spanning
    assert alone.beyond_s > 1e-3
    assert (alone.pulling_fraction, alone.shared_s, alone.pulls_longer_fraction) == (0, 0, 0)
