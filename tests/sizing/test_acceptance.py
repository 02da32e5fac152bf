"""The acceptance pack: a test that decides, its limits, and rules that say the same afterwards."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.run.run_config import RunLength, make_job, planned_load
from minicluster.plan import Plan, read_plan
from minicluster.specs.slo import SloSpec
from minicluster.stats.shares import share_interval
from minicluster.workload.sample_size import default_requests, most_late
from sizing.report.acceptance import acceptance, acceptance_files, alert_rules
from tests.sizing.conftest import QUICK, Sizing
from tests.sizing.scenarios import inputs, proposed

SLO = SloSpec(ttft_s=0.75, tpot_s=0.04, itl_s=0.2, e2e_s=20.0, percentile="p95")


def planned() -> Plan:
    """Return a plan with a limit on every latency."""
    return proposed(inputs()).under(slo=SLO)


def expressions(plan: Plan) -> dict[str, str]:
    """Return the condition of each alert."""
    groups: list[dict[str, Any]] = alert_rules(plan)["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


@pytest.mark.parametrize("percentile", ["p50", "p90", "p95", "p99"])
def test_so_many_late_requests_are_met_and_one_more_is_open(percentile: str) -> None:
    """The page's allowance is where the verdict's interval of independent requests ends."""
    requests, level = default_requests(percentile), float(percentile[1:]) / 100
    late = most_late(requests, level)
    assert late > 0
    assert share_interval(1 - late / requests, requests, 1.0).low >= level
    assert share_interval(1 - (late + 1) / requests, requests, 1.0).low < level


def test_too_few_requests_prove_nothing() -> None:
    """Ten requests allow not even none to be late at p99."""
    assert most_late(10, 0.99) == -1


def test_the_pack_asks_for_the_load_that_the_load_test_would() -> None:
    """Its request count is the default of `loadtest run`, and its plan is the plan."""
    plan = planned()
    test = acceptance(plan)
    job = make_job(planned_load(plan), RunLength(), host="http://x")
    assert test.requests == job.num_requests == default_requests("p95")
    assert test.run_s == pytest.approx(test.requests / plan.workload.requests_per_s)
    script = acceptance_files(test)["accept.sh"]
    assert f"--requests {test.requests} --seed" in script


def test_the_script_hands_its_options_on(tmp_path: Path) -> None:
    """`sh accept.sh ENDPOINT --requests N` asks `loadtest` for N; without an endpoint it ends."""
    for name, text in acceptance_files(acceptance(planned())).items():
        (tmp_path / name).write_text(text)
    fake = tmp_path / "loadtest"
    fake.write_text('#!/bin/sh\nprintf "%s " "$@"\nexit 3\n')
    fake.chmod(0o755)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(tmp_path / "accept.sh"), *arguments]
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(command, env=path, capture_output=True, text=True, check=False)

    said = run("http://x:1", "--requests", "9000")
    assert said.returncode == 3
    assert said.stdout.startswith("run plan.json --requests ")
    assert "--host http://x:1" in said.stdout
    assert said.stdout.rstrip().endswith("--requests 9000")
    none = run()
    assert none.returncode == 2
    assert "the address of the endpoint" in none.stderr


def test_every_limit_has_a_rule() -> None:
    """The endpoint's share beyond a limit, at the bucket that ends there, and vLLM's percentile."""
    found = expressions(planned())
    for metric, limit_s in SLO.limits_s.items():
        name = metric.capitalize()
        assert (
            f'minicluster_{metric}_seconds_bucket{{le="{float(limit_s)}"}}'
            in (found[f"{name}Missed"])
        )
        assert found[f"{name}Missed"].endswith("> 0.05")
        assert re.match(r"histogram_quantile\(0\.95, ", found[f"{name}MissedByEngines"])
        assert found[f"{name}MissedByEngines"].endswith(f"> {limit_s:g}")
    assert found["LoadBeyondAcceptance"].endswith("> 20")


def test_a_limit_that_is_not_promised_has_no_rule() -> None:
    """Rules are those of the plan's limits alone."""
    plan = planned().under(slo=replace(SLO, itl_s=None, e2e_s=None))
    assert {"ItlMissed", "E2eMissed"}.isdisjoint(expressions(plan))


def test_the_command_writes_the_pack(
    sizing: Sizing, plan_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The plan is unchanged, the page says how many may be late, Prometheus takes the rules."""
    file, out = plan_of(*QUICK), tmp_path / "pack"
    said = sizing("accept", str(file), "-o", str(out))
    assert said.code == 0
    assert read_plan(out / "plan.json") == read_plan(file)
    count = default_requests("p99")
    page = (out / "index.html").read_text()
    assert f"{count:,}" in page
    assert f"{most_late(count, 0.99)}" in page
    assert yaml.safe_load((out / "alerts.yml").read_text())["groups"]
    promtool = shutil.which("promtool")
    if promtool:
        subprocess.run([promtool, "check", "rules", str(out / "alerts.yml")], check=True)
