"""The verdict as JUnit XML, which CI systems show."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from loadtest.report.table import latency_text
from loadtest.verdict.verdict import PROVES_NOTHING, Verdict
from minicluster.stats.shares import LEVELS

if TYPE_CHECKING:
    from loadtest.verdict.prediction import Comparison
    from loadtest.verdict.slo import SloResult

SUITE = "loadtest"
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(verdict: Verdict, *, require_prediction: bool) -> str:
    """
    Return *verdict* as one test suite.

    The run's validity, every limit and the prediction have a test case each. A missed limit fails,
    and so does a required prediction that did not hold; an undecided limit is an error, because a
    green build must not rest on it.
    """
    suite = ET.Element("testsuite", name=SUITE, time=f"{verdict.metadata.wall_s:.3f}")
    _properties(suite, verdict)
    _validity(suite, verdict)
    for result in verdict.slo:
        _limit(suite, verdict, result)
    if verdict.comparison:
        _prediction(suite, verdict.comparison, required=require_prediction)
    if verdict.notes:
        ET.SubElement(suite, "system-out").text = _clean("\n".join(verdict.notes))
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(kind) is not None for case in cases)))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _properties(suite: ET.Element, verdict: Verdict) -> None:
    group = ET.SubElement(suite, "properties")
    facts = {
        "verdict": verdict.verdict,
        "exit_code": verdict.exit_code,
        "host": verdict.metadata.host,
        "model": verdict.metadata.model,
        "machine": verdict.metadata.machine,
        "goodput_requests_per_s": f"{verdict.throughput.good_requests_per_s:.3f}",
        "slo_attainment": f"{verdict.throughput.good_fraction:.5f}",
    }
    for name, value in facts.items():
        ET.SubElement(group, "property", name=name, value=_clean(str(value)))


def _case(suite: ET.Element, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=SUITE, name=name)


def _validity(suite: ET.Element, verdict: Verdict) -> None:
    case = _case(suite, "the run is valid")
    unsettled = verdict.verdict == "inconclusive" and all(
        result.verdict != "inconclusive" for result in verdict.slo
    )
    if unsettled or verdict.verdict in PROVES_NOTHING:
        _add(case, "error", "; ".join(verdict.reasons))


def _limit(suite: ET.Element, verdict: Verdict, result: SloResult) -> None:
    caveat = verdict.caveat
    name = f"{result.name} < {1000 * result.limit_s:g} ms"
    case = _case(suite, name)
    text = f"{latency_text(result.measured_s)}; {result.attained_text}{caveat}"
    below = result.attained_fraction < LEVELS[result.percentile]
    if verdict.verdict in PROVES_NOTHING:
        _add(case, "error", f"the run proves nothing: {text}")
    elif result.verdict == "missed" or (verdict.verdict == "missed" and below):
        _add(case, "failure", text)
    elif verdict.verdict == "inconclusive" and result.verdict == "inconclusive":
        _add(case, "error", f"inconclusive: {'; '.join(verdict.reasons)}")
    ET.SubElement(case, "system-out").text = _clean(text)


def _prediction(suite: ET.Element, comparison: Comparison, *, required: bool) -> None:
    case = _case(suite, "the prediction held")
    if not comparison.held:
        means = [r for r in comparison.rows if r.statistic == "mean"]
        text = ", ".join(f"{r.metric.upper()} mean {r.judged_error_fraction:+.0%}" for r in means)
        _add(case, "failure" if required else "skipped", f"predicted / measured - 1: {text}")


def _add(case: ET.Element, kind: str, text: str) -> None:
    ET.SubElement(case, kind, message=_clean(text))


def _clean(text: str) -> str:
    return NOT_XML.sub("?", text)
