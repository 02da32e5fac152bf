"""The verdict as JUnit XML, which every CI system draws."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from minicluster.stats.quantiles import LEVELS

if TYPE_CHECKING:
    from loadtest.verdict.slo import SloResult
    from loadtest.verdict.verdict import Verdict

SUITE = "loadtest"
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(verdict: Verdict, *, require_prediction: bool) -> str:
    """
    Write *verdict* as one test suite.

    A case each for the run's validity, every limit, and the prediction. A limit that was missed,
    or a prediction that was required and did not hold, fails; what a run could not tell is an
    error, for a green build must not rest on it.
    """
    suite = ET.Element("testsuite", name=SUITE, time=f"{verdict.setting.wall_s:.3f}")
    _properties(suite, verdict)
    _validity(suite, verdict)
    for promise in verdict.promises:
        _limit(suite, verdict, promise)
    if verdict.comparison:
        _prediction(suite, verdict, required=require_prediction)
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for kind in ("failure", "error", "skipped"):
        plural = {"failure": "failures", "error": "errors"}.get(kind, kind)
        suite.set(plural, str(sum(case.find(kind) is not None for case in cases)))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _properties(suite: ET.Element, verdict: Verdict) -> None:
    group = ET.SubElement(suite, "properties")
    facts = {
        "verdict": verdict.verdict,
        "exit_code": verdict.exit_code,
        "host": verdict.setting.host,
        "model": verdict.setting.model,
        "machine": verdict.setting.machine,
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
        promise.verdict != "open" for promise in verdict.promises
    )
    if unsettled or verdict.verdict in {"invalid", "failed", "interrupted"}:
        _say(case, "error", "; ".join(verdict.reasons))


def _limit(suite: ET.Element, verdict: Verdict, promise: SloResult) -> None:
    case = _case(
        suite, f"{promise.metric.upper()} {promise.percentile} < {1000 * promise.limit_s:g} ms"
    )
    measured = promise.measured_s
    seen = "endless" if measured is None else f"{1000 * measured:.1f} ms"
    text = (
        f"{seen}; {promise.attained_fraction:.3%} of {promise.num} within the limit, 95 % interval "
        f"{promise.attained_low:.3%} to {promise.attained_high:.3%}"
    )
    if verdict.verdict in {"invalid", "failed", "interrupted"}:
        _say(case, "error", f"the run proves nothing: {text}")
    elif promise.verdict == "missed" or (verdict.verdict == "missed" and _short(promise)):
        _say(case, "failure", text)
    elif verdict.verdict == "inconclusive" and promise.verdict == "open":
        _say(case, "error", f"inconclusive: {'; '.join(verdict.reasons)}")
    ET.SubElement(case, "system-out").text = _clean(text)


def _short(promise: SloResult) -> bool:
    """Whether fewer keep the limit than promised, surely or not."""
    return promise.attained_fraction < LEVELS[promise.percentile]


def _prediction(suite: ET.Element, verdict: Verdict, *, required: bool) -> None:
    case = _case(suite, "the prediction held")
    if verdict.comparison and not verdict.comparison.held:
        rows = [r for r in verdict.comparison.rows if r.statistic == "mean"]
        text = ", ".join(f"{r.metric.upper()} mean {r.error_fraction:+.0%}" for r in rows)
        _say(case, "failure" if required else "skipped", f"predicted / measured - 1: {text}")


def _say(case: ET.Element, kind: str, text: str) -> None:
    ET.SubElement(case, kind, message=_clean(text))


def _clean(text: str) -> str:
    """Leave out what XML cannot hold."""
    return NOT_XML.sub("?", text)
