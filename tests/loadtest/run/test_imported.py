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
from loadtest.run.imported import READERS, Pacing, ToolRequest, read_answers
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


def capped(waits_s: list[float] | None, most: int | None, rate: object = 10.0) -> dict[str, Any]:
    """Return results of `vllm bench serve` of 40 requests, one after the other each 0.5 s."""
    count, gaps = 40, [0.02] * 10
    told: dict[str, Any] = {
        "num_prompts": count, "request_throughput": 2.0, "request_rate": rate, "burstiness": 1.0,
        "max_concurrency": most, "input_lens": [64] * count, "output_lens": [11] * count,
        "start_times": [1000 + 0.5 * k for k in range(count)], "ttfts": [0.3] * count,
        "itls": [gaps] * count, "errors": [""] * count, "latencies": [0.5] * count,
    }  # fmt: skip
    return told if waits_s is None else told | {"queue_times": waits_s}


RISING = [0.4 * k for k in range(40)]
NONE = [0.0] * 40


@pytest.mark.parametrize(
    ("raw", "ttft_s", "per_s", "caveats", "says"),
    [
        (capped(RISING, 1), 8.1, 10, ["at most 1 in flight (waits in the client included)"],
         "begin when a request was due"),
        (capped(None, 1), 0.3, 2, ["at most 1 in flight (waits in the client not included)"],
         "they flatter the endpoint"),
        (capped(RISING, 1, "inf"), 0.3, 2, ["at most 1 in flight (closed loop)"], "closed loop"),
        (capped(None, 1, "inf"), 0.3, 2, ["at most 1 in flight (closed loop)"], "closed loop"),
        (capped(NONE, 64), 0.3, 2, [], "the cap changed nothing"),
        (capped(None, 64), 0.3, 2, [], "the cap changed nothing"),
        (capped(NONE, None), 0.3, 2, [], ""),
        (capped([0.1] * 40, None), 0.4, 2, [], ""),
        (capped(None, None), 0.3, 2, [], ""),
    ],
)  # fmt: skip
def test_a_cap_on_requests_in_flight_stands_beside_the_figures(
    tmp_path: Path, raw: object, ttft_s: float, per_s: float, caveats: list[str], says: str
) -> None:
    """TTFT is from the due time where the file has it; all that is shown names the cap."""
    plan, run = plan_json(make_plan(), tmp_path), tmp_path / "run"
    junit = tmp_path / "junit.xml"
    done = loadtest("import", written(tmp_path, raw), plan, "-o", run, "--junit", junit)
    found = json.loads((run / "verdict.json").read_text())

    assert found["latency"]["ttft"]["mean_s"] == pytest.approx(ttft_s)
    assert found["latency"]["e2e"]["mean_s"] == pytest.approx(ttft_s + 0.2)
    assert found["throughput"]["offered_requests_per_s"] == pytest.approx(per_s)
    assert found["metadata"]["caveats"] == caveats
    about_a_cap = [note for note in found["notes"] if "in flight" in note]
    assert [says in note for note in about_a_cap] == [True] * bool(says)
    for text in (done.stdout, (run / "report.html").read_text(), junit.read_text()):
        assert all(caveat in " ".join(text.split()) for caveat in caveats)
    # What the tool did on purpose is no fault of a client; a wait without a cap is.
    late = not caveats and ttft_s > 0.3
    assert any("not fit" in reason for reason in found["reasons"]) == late
    compared = loadtest("compare", run, run, "--json")
    assert all(caveat in compared.stdout for caveat in caveats)


STRATEGIES: list[tuple[dict[str, Any] | None, bool, Pacing]] = [
    (None, True, Pacing(told=False)),
    ({"type_": "synchronous"}, True, Pacing(most=1, closed=True)),
    ({"type_": "concurrent", "streams": 4}, True, Pacing(most=4, closed=True)),
    ({"type_": "throughput", "max_concurrency": 9}, True, Pacing(most=9, closed=True)),
    ({"type_": "throughput", "max_concurrency": None}, True, Pacing(closed=True)),
    ({"type_": "constant", "max_concurrency": 3}, True, Pacing(most=3, due=True)),
    ({"type_": "poisson", "max_concurrency": None}, True, Pacing(due=True)),
    ({"type_": "poisson", "max_concurrency": 2}, False, Pacing(most=2)),
    ({"type_": "trace"}, True, Pacing(due=True)),
]


@pytest.mark.parametrize(("strategy", "on_the_clock", "pacing"), STRATEGIES)
def test_guidellm_says_by_its_strategy(
    tmp_path: Path, strategy: dict[str, Any] | None, pacing: Pacing, *, on_the_clock: bool
) -> None:
    """With a schedule, a target on the clock of the other times is when a request was due."""
    raw = document("GuideLLM")
    [benchmark] = raw["benchmarks"]
    benchmark["config"] = {"strategy": strategy} if strategy else {}
    for kept in benchmark["requests"].values():
        for each in kept:
            offset_s = each["request_start_time"] if on_the_clock else 6.2
            each["info"]["timings"]["targeted_start"] = offset_s - 0.2
    found = read_answers(written(tmp_path, raw))
    wait_s = 0.2 if pacing.due else 0.0
    assert all(each.start_s - each.due_s == pytest.approx(wait_s, abs=1e-6) for each in found)
    _, _, read = READERS["GuideLLM"]
    assert read(raw, None) == pacing


def timed(*spans: tuple[float, float]) -> list[ToolRequest]:
    return [ToolRequest(due_s=a, start_s=a, end_s=b, input_tokens=1) for a, b in spans]


@pytest.mark.parametrize("tool", ["AIPerf", "inference-perf"])
def test_a_file_that_does_not_tell_of_a_cap_is_said_not_to(tool: str) -> None:
    _, _, pacing = READERS[tool]
    caveats, remark = pacing(None, None).said(tool, timed((0, 2), (1, 3)))
    assert caveats == ()
    assert "does not say whether it capped requests in flight" in remark
    assert "at most 2 were in flight at once" in remark


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
        "has only 10 successful requests; it has to be a file of all 11",
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
    "a negative wait": (lambda: capped([-1.0, *NONE[1:]], 1), "request 1"),
    "a wait that is none": (lambda: capped([None, *NONE[1:]], 1), "streamed answers"),  # type: ignore[list-item]
    "too few waits": (lambda: capped(NONE[1:], 1), '"queue_times": 39'),
    "a cap of nothing": (lambda: capped(NONE, 0), "0 requests in flight at most"),
    "a cap in words": (lambda: capped(NONE, "one"), "'one' requests in flight"),  # type: ignore[arg-type]
    "times fall": (
        lambda: changed("inference-perf", lambda raw: raw[1].update(start_time=9e9)), "request 2",
    ),
    "no time at all": (
        lambda: changed("inference-perf", lambda raw: raw[1].update(end_time=float("nan"))),
        "times are finite and rise",
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
