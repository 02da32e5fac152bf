"""`sizing accept`: what a buyer holds a vendor to, as files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from minicluster.pages.page import DataTable, FactTable, Page, Section, Text, Tile, ToType
from minicluster.plan import Plan, to_json
from minicluster.stats.shares import LEVELS
from minicluster.units import seconds
from minicluster.workload.sample_size import most_late, requests_to_judge
from sizing.report.plan_screen import headline

SEED = 20
"""Seed of the accepted load: both sides send the same requests, and no search was made with it."""

EXIT_CODES = (
    ("0", "met: accepted"),
    ("3", "missed: not accepted"),
    ("4", "inconclusive, or the client was unfit: repeat with as many --requests as it asks for"),
    ("5", "the endpoint failed: not accepted"),
    ("2", "a bad option or file: nothing was tested"),
)
"""Exit codes of `loadtest run` (docs/loadtest.md), and what each means here."""

VLLM_METRICS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
"""Histograms of vLLM's own servers; their buckets do not end at the limits."""

WINDOW, LASTS = "1h", "15m"
"""Time over which an alert counts, and for which it has to be true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceTest:
    """
    A plan as a test that both sides can run.

    Attributes:
        requests: measured requests, enough that the verdict is met or missed.
        run_s: seconds that they take to arrive.
    """

    plan: Plan
    requests: int
    run_s: float

    @property
    def command(self) -> str:
        """The load test, from the folder of the pack."""
        return f"loadtest run plan.json --requests {self.requests} --seed {SEED}"


def acceptance(plan: Plan) -> AcceptanceTest:
    """Return the test of a plan: its load, and as many requests as prove its limits."""
    requests = requests_to_judge(plan.workload, plan.inputs.scenario.slo)
    run_s = requests / plan.workload.requests_per_s
    return AcceptanceTest(plan=plan, requests=requests, run_s=run_s)


def acceptance_files(test: AcceptanceTest) -> dict[str, str]:
    """Return the pack's files by name, without its page."""
    script = (
        "#!/bin/sh\n"
        f"# {headline(test.plan)}\n"
        "# sh accept.sh ENDPOINT [OPTIONS of loadtest run]: exit code 0 accepts, index.html has the"
        " others.\n"
        ': "${1:?the address of the endpoint, such as http://127.0.0.1:8000}"\n'
        'cd "$(dirname "$0")" || exit 2\n'
        f'endpoint=$1 && shift && exec {test.command} --host "$endpoint" --output run'
        ' --junit run.xml "$@"\n'
    )
    rules = yaml.safe_dump(alert_rules(test.plan), sort_keys=False, width=100)
    return {"plan.json": to_json(test.plan), "accept.sh": script, "alerts.yml": rules}


def alert_rules(plan: Plan) -> dict[str, Any]:
    """
    Return Prometheus' rules for the time after acceptance.

    This project's endpoint has a bucket that ends at each limit, so that the share beyond it is
    exact; of vLLM's own histograms the percentile is interpolated within a bucket.
    """
    own, engines = [], []
    late = 1 - plan.slo.level
    for metric, limit_s in plan.slo.limits_s.items():
        name, said = f"minicluster_{metric}_seconds", f"{metric.upper()} {plan.slo.percentile}"
        within = f'sum(rate({name}_bucket{{le="{float(limit_s)}"}}[{WINDOW}]))'
        share = f"1 - {within} / sum(rate({name}_count[{WINDOW}]))"
        own.append(_rule(f"{metric}Missed", f"{share} > {late:.4g}", f"{said} above {limit_s:g} s"))
        if metric in VLLM_METRICS and plan.engine.name == "vllm":
            buckets = f"sum by (le) (rate({VLLM_METRICS[metric]}_bucket[{WINDOW}]))"
            expression = f"histogram_quantile({plan.slo.level:g}, {buckets}) > {limit_s:g}"
            engines.append(_rule(f"{metric}MissedByEngines", expression, f"{said}, by vLLM"))
    rate = f"{plan.workload.requests_per_s:g}"
    load = f"sum(rate(minicluster_requests_total[{LASTS}])) > {rate}"
    own.append(_rule("LoadBeyondAcceptance", load, f"more than the accepted {rate} requests/s"))
    groups = [{"name": "minicluster-endpoint", "rules": own}]
    if engines:
        groups.append({"name": "minicluster-vllm", "rules": engines})
    return {"groups": groups}


def _rule(name: str, expression: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name[0].upper() + name[1:],
        "expr": expression,
        "for": LASTS,
        "annotations": {"summary": summary},
    }


def acceptance_page(test: AcceptanceTest) -> Page:
    """Return the page of the pack: what is accepted, by which test, with which outcome."""
    plan = test.plan
    limits = [
        (of or "all requests", slo, metric, limit_s)
        for of, slo in plan.promises.items()
        for metric, limit_s in slo.limits_s.items()
    ]
    shares = {part.name: part.requests_per_s / plan.workload.requests_per_s
              for part in plan.workload.parts}  # fmt: skip
    rows = []
    for of, slo, metric, limit_s in limits:
        count = int(test.requests * shares.get(of, 1.0))
        allowed = most_late(count, LEVELS[slo.percentile])
        limit = f"{slo.percentile} at most {seconds(limit_s)}"
        rows.append((f"{metric.upper()} of {of}", limit, f"{count:,}", f"{allowed:,}"))
    table = DataTable(("limit", "what holds", "requests", "late at most"), tuple(rows))
    return Page(
        title=f"Acceptance: {plan.model.id}",
        headline=f"Accepted if {test.requests:,} requests meet the limits",
        lines=(headline(plan),),
        tiles=(
            Tile(name="requests", value=f"{test.requests:,}"),
            Tile(name="run", value=seconds(test.run_s), below="and the warm-up before it"),
        ),
        parts=(
            Section(
                "The limits",
                (
                    table,
                    Text(
                        "Met means that the 95 % interval of the share within a limit is at or"
                        " above its percentile. So many may be late if they are late one by one;"
                        " where they come in bursts, the interval is wider, and fewer."
                    ),
                ),
            ),
            Section(
                "The test",
                (
                    ToType("sh accept.sh http://ENDPOINT:8000", "the whole test, on either side"),
                    ToType(test.command, "the same by hand; the seed makes the load the same"),
                    FactTable(EXIT_CODES),
                ),
            ),
            Section(
                "Afterwards",
                (Text("alerts.yml has Prometheus' rules for the same limits, and for more load"
                      " than was accepted."),),
            ),
        ),
        footer="minicluster, sizing accept",
    )  # fmt: skip
