"""Results that other load generators wrote (tests/loadtest/run/results), read as runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from loadtest.run.folder import read_run
from loadtest.run.imported import READERS, read_answers
from minicluster.errors import InputError
from tests.loadtest.command import loadtest
from tests.loadtest.made import make_plan, plan_json

RESULTS = Path(__file__).with_name("results")
FILES = {
    "vllm bench serve": "vllm.json", "GuideLLM": "guidellm.json", "AIPerf": "aiperf.jsonl",
    "inference-perf": "inference_perf.json",
}  # fmt: skip
TTFT_S, GAP_S, TOKENS = 0.1, 0.01, 12
"""Of the mock server that all tools loaded."""
LATE_S = 0.02
"""Most that client and machine add to the mean TTFT in these files."""


def document(tool: str) -> Any:  # noqa: ANN401  (a document of another tool)
    text = (RESULTS / FILES[tool]).read_text()
    return (
        [json.loads(line) for line in text.splitlines()] if tool == "AIPerf" else json.loads(text)
    )


def written(folder: Path, changed: object) -> Path:
    file = folder / "results.json"
    file.write_text(json.dumps(changed))
    return file


@pytest.mark.parametrize("tool", READERS)
def test_every_tool_measured_the_mock_server(tool: str) -> None:
    """TTFT, time per token and tokens by the server's count; the twelfth request is no answer."""
    *answers, failed = sorted(
        read_answers(RESULTS / FILES[tool]), key=lambda each: (each.outcome != "ok", each.start_s)
    )
    assert len(answers) == 11
    for each in answers:
        assert each.output_tokens == len(each.chunk_s) == TOKENS
        assert each.input_tokens
        assert each.chunk_s[0] - each.start_s >= TTFT_S
    # One by one the tools' own clients are up to 30 ms off.
    ttft_s = fmean(each.chunk_s[0] - each.start_s for each in answers)
    gap_s = fmean((each.chunk_s[-1] - each.chunk_s[0]) / (TOKENS - 1) for each in answers)
    assert ttft_s < TTFT_S + LATE_S
    assert gap_s == pytest.approx(GAP_S, rel=0.1)
    assert failed.chunk_s == ()
    # `vllm bench serve` keeps no status.
    assert failed.outcome == ("server_error" if tool == "vllm bench serve" else "shed")


@pytest.mark.parametrize("tool", READERS)
def test_an_imported_run_is_judged_and_compared(tool: str, tmp_path: Path) -> None:
    plan = plan_json(make_plan(), tmp_path)
    done = loadtest("import", RESULTS / FILES[tool], plan, "-o", tmp_path / "run", "--json")
    assert done.returncode in {3, 4}, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["latency"]["ttft"]["mean_s"] == pytest.approx(TTFT_S, abs=LATE_S)
    assert verdict["latency"]["tpot"]["mean_s"] == pytest.approx(GAP_S, rel=0.1)
    assert verdict["outcomes"]["ok"] == 11
    assert len(read_run(tmp_path / "run").samples) == 12
    compared = loadtest("compare", tmp_path / "run", tmp_path / "run", "--json")
    assert json.loads(compared.stdout)["paired"]


def test_aiperf_keeps_when_a_request_was_due() -> None:
    assert all(
        0 < each.start_s - each.due_s < 0.01 for each in read_answers(RESULTS / "aiperf.jsonl")
    )


def test_inference_perf_0_5_names_its_fields_otherwise(tmp_path: Path) -> None:
    older = document("inference-perf")
    for each in older:
        each["info"]["response_info"] = each["info"].pop("response_metrics")
    assert read_answers(written(tmp_path, older)) == read_answers(RESULTS / "inference_perf.json")


def test_what_a_tool_cut_off_at_its_end_does_not_count(tmp_path: Path) -> None:
    """It is sent, and neither an answer nor a failure of the endpoint; unsent ones are nothing."""
    cut = document("GuideLLM")
    [benchmark] = cut["benchmarks"]
    requests, totals = benchmark["requests"], benchmark["metrics"]["request_totals"]
    begun = {**requests["errored"][0], "output_tokens": 3}
    requests["incomplete"] = [begun, {**begun, "request_start_time": None}]
    totals["incomplete"] = 2
    found = read_answers(written(tmp_path, cut))
    assert [each.outcome for each in found].count("unfinished") == 1
    plan = plan_json(make_plan(), tmp_path)
    done = loadtest("import", written(tmp_path, cut), plan, "-o", tmp_path / "run", "--json")
    assert sum(json.loads(done.stdout)["outcomes"].values()) == 12


def test_a_clock_that_is_none_gives_no_date(tmp_path: Path) -> None:
    """`vllm bench` counts from the machine's start, GuideLLM from 1970."""
    plan = plan_json(make_plan(), tmp_path)
    for tool, known in (("vllm bench serve", False), ("GuideLLM", True)):
        loadtest("import", RESULTS / FILES[tool], plan, "-o", tmp_path / "run")
        report = json.loads((tmp_path / "run" / "llm-d.json").read_text())
        assert ("start" in report["run"]["time"]) == known


def changed(tool: str, change: Callable[[Any], object]) -> object:
    """Return a tool's results, changed in place, or what the change returns."""
    found = copy.deepcopy(document(tool))
    return change(found) or found


def answer_of(tokens: float) -> object:
    """Return results of AIPerf with such a count, without times of chunks."""
    counted = {"usage_completion_tokens": {"value": tokens}, "inter_chunk_latency": None}
    return changed("AIPerf", lambda raw: raw[0]["metrics"].update(counted))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no requests in it": (
        lambda: changed("vllm bench serve", lambda raw: raw.pop("ttfts") and None),
        "--save-detailed",
    ),
    "columns of other lengths": (
        lambda: changed("vllm bench serve", lambda raw: raw["ttfts"].pop() and None),
            '"ttfts": 11',
    ),
    "another tool": (lambda: {"results": []}, "GuideLLM, AIPerf or inference-perf"),
    "a summary of AIPerf": (
        lambda: {"aiperf_version": "0.13", "request_throughput": {}}, "profile_export.jsonl",
    ),
    "a summary of inference-perf": (
        lambda: {"load_summary": {}, "successes": {}}, "per_request: true",
    ),
    "several benchmarks": (
        lambda: changed("GuideLLM", lambda raw: raw["benchmarks"].append({})), "--benchmark",
    ),
    "a sample of the requests": (
        lambda: changed(
            "GuideLLM", lambda raw: raw["benchmarks"][0]["requests"]["successful"].pop() and None
        ),
        "all 11 successful requests",
    ),
    "one request": (lambda: changed("inference-perf", lambda raw: raw[:1]), "two requests"),
    "a field is gone": (
        lambda: changed("inference-perf", lambda raw: raw[0].pop("end_time") and None),
        "KeyError: 'end_time'",
    ),
    "not streamed": (
        lambda: changed(
            "inference-perf",
            lambda raw: raw[0]["info"]["response_metrics"].pop("chunk_times") and None,
        ),
        "streamed answers",
    ),
    "times fall": (
        lambda: changed("inference-perf", lambda raw: raw[1].update(start_time=9e9)), "request 2",
    ),
    "no time at all": (
        lambda: changed("inference-perf", lambda raw: raw[1].update(end_time=float("nan"))),
        "finite times",
    ),
    "an answer of nothing": (
        lambda: changed(
            "inference-perf", lambda raw: raw[1]["info"]["response_metrics"].update(chunk_times=[])
        ),
        "or an error",
    ),
    "endless tokens": (lambda: answer_of(float("inf")), "OverflowError: "),
    "more tokens than memory": (lambda: answer_of(1e30), "tokens in an answer"),
    "no count of prompt tokens": (
        lambda: changed(
            "GuideLLM",
            lambda raw: raw["benchmarks"][0]["requests"]["successful"][0].update(
                prompt_tokens=None
            ),
        ),
        "a count of prompt tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_says_where_and_why(case: str, tmp_path: Path) -> None:
    make, says = REFUSED[case]
    results = written(tmp_path, make())
    done = loadtest("import", results, plan_json(make_plan(), tmp_path), "-o", tmp_path / "run")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_texts_that_are_no_results(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "no json", "", "\x00"):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(InputError, match="AIPerf"):
            read_answers(tmp_path / "results.json")


def test_one_of_several_benchmarks_is_chosen(tmp_path: Path) -> None:
    two = document("GuideLLM")
    two["benchmarks"].append(copy.deepcopy(two["benchmarks"][0]))
    two["benchmarks"][1]["requests"]["successful"].pop()
    two["benchmarks"][1]["metrics"]["request_totals"]["successful"] = 10
    file = written(tmp_path, two)
    assert len(read_answers(file, benchmark=2)) == 11
    with pytest.raises(InputError, match="from 1 to 2"):
        read_answers(file, benchmark=3)
