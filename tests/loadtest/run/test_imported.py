"""
Results of other load generators, read as runs.

The files are made here, with the fields that the tools' own sources name; no tool was run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.run.folder import read_run
from loadtest.run.imported import READERS, Answer, read_answers
from minicluster.errors import InputError
from tests.loadtest.command import loadtest
from tests.loadtest.made import make_plan, plan_json

Document = dict[str, Any] | list[dict[str, Any]]

START_S = 1_764_000_000.0
REQUESTS = tuple(
    Answer(
        start_s=START_S + 0.5 * at,
        end_s=START_S + 0.5 * at + 0.2 + 0.02 * (9 + at % 3),
        input_tokens=100 + at,
        output_tokens=10 + at % 3,
        chunk_s=tuple(START_S + 0.5 * at + 0.2 + 0.02 * token for token in range(10 + at % 3)),
    )
    for at in range(40)
)
FAILED = Answer(
    start_s=START_S + 30, end_s=START_S + 31, input_tokens=7, output_tokens=0, error="500 broken"
)


def vllm_bench(answers: tuple[Answer, ...]) -> dict[str, Any]:
    return {
        "request_throughput": 2.0,
        "start_times": [each.start_s for each in answers],
        "ttfts": [each.chunk_s[0] - each.start_s if each.chunk_s else 0.0 for each in answers],
        "itls": [[b - a for a, b in pairwise(each.chunk_s)] for each in answers],
        "input_lens": [each.input_tokens for each in answers],
        "output_lens": [each.output_tokens for each in answers],
        "errors": [each.error for each in answers],
    }


def guidellm(answers: tuple[Answer, ...]) -> dict[str, Any]:
    def one(each: Answer) -> dict[str, Any]:
        times = each.chunk_s or (None,)
        timings = {"first_token_iteration": times[0], "last_token_iteration": times[-1]}
        return {
            "request_start_time": each.start_s, "request_end_time": each.end_s,
            "prompt_tokens": each.input_tokens, "output_tokens": each.output_tokens or None,
            "time_per_output_token_ms": 1e9, "info": {"timings": timings, "error": each.error},
        }  # fmt: skip

    requests = {
        "successful": [one(each) for each in answers if not each.error],
        "errored": [one(each) for each in answers if each.error],
        "incomplete": [],
    }
    return {"benchmarks": [{"requests": requests}]}


def aiperf(answers: tuple[Answer, ...]) -> list[dict[str, Any]]:
    def one(each: Answer) -> dict[str, Any]:
        metadata = {
            "request_start_ns": round(each.start_s * 1e9),
            "request_end_ns": round(each.end_s * 1e9),
            "benchmark_phase": "profiling",
        }
        if each.error:
            metrics: dict[str, Any] = {"error_isl": {"value": 7, "unit": "tokens"}}
            error = {"code": 500, "type": "ServerError", "message": each.error}
            return {"metadata": metadata, "metrics": metrics, "error": error}
        ttft_ms = 1e3 * (each.chunk_s[0] - each.start_s)
        metrics = {
            "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
            "request_latency": {"value": 1e3 * (each.end_s - each.start_s), "unit": "ms"},
            "output_sequence_length": {"value": each.output_tokens, "unit": "tokens"},
            "input_sequence_length": {"value": each.input_tokens, "unit": "tokens"},
        }
        return {"metadata": metadata, "metrics": metrics, "error": None}

    warmup = {"metadata": {"benchmark_phase": "warmup"}, "metrics": {}, "error": None}
    return [warmup, *(one(each) for each in answers)]


def inference_perf(answers: tuple[Answer, ...]) -> list[dict[str, Any]]:
    return [
        {
            "start_time": each.start_s,
            "end_time": each.end_s,
            "info": {
                "input_tokens": each.input_tokens,
                "output_tokens": each.output_tokens,
                "output_token_times": list(each.chunk_s),
            },
            "error": {"error_type": each.error} if each.error else None,
        }
        for each in answers
    ]


MADE: dict[str, Callable[[tuple[Answer, ...]], Document]] = {
    "vllm bench serve": vllm_bench, "GuideLLM": guidellm, "AIPerf": aiperf,
    "inference-perf": inference_perf,
}  # fmt: skip


def written(folder: Path, tool: str, document: Document) -> Path:
    file = folder / f"{tool.replace(' ', '-')}.json"
    if tool == "AIPerf":
        file.write_text("".join(json.dumps(each) + "\n" for each in document))
    else:
        file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize("tool", READERS)
def test_the_same_requests_are_read_from_every_tool(tool: str, tmp_path: Path) -> None:
    """Send, first and last token, counts and the failed request are the same for all."""
    found = read_answers(written(tmp_path, tool, MADE[tool]((*REQUESTS, FAILED))))
    *answers, failed = sorted(found, key=lambda each: (bool(each.error), each.start_s))
    assert len(answers) == len(REQUESTS)
    for each, known in zip(answers, REQUESTS, strict=True):
        assert (each.input_tokens, each.output_tokens) == (known.input_tokens, known.output_tokens)
        assert each.start_s == pytest.approx(known.start_s, abs=1e-6)
        assert each.chunk_s == pytest.approx(known.chunk_s, abs=1e-5)
    assert "500" in failed.error
    assert failed.chunk_s == ()
    assert failed.start_s == pytest.approx(FAILED.start_s)


@pytest.mark.parametrize("tool", READERS)
def test_an_imported_run_is_judged_and_compared(tool: str, tmp_path: Path) -> None:
    """Its TTFT begins with the send, and TPOT is that of the tokens after the first."""
    plan = plan_json(make_plan(), tmp_path)
    results = written(tmp_path, tool, MADE[tool]((*REQUESTS, FAILED)))
    done = loadtest("import", results, plan, "-o", tmp_path / "run", "--json")
    assert done.returncode in {0, 3, 4}, done.stderr
    samples = read_run(tmp_path / "run").samples
    assert [each.outcome for each in samples].count("server_error") == 1
    answered = [each for each in samples if each.ok]
    assert [each.ttft_s for each in answered] == pytest.approx([0.2] * 40, abs=1e-4)
    assert [each.tpot_s for each in answered] == pytest.approx([0.02] * 40, abs=1e-4)
    compared = loadtest("compare", tmp_path / "run", tmp_path / "run", "--json")
    assert json.loads(compared.stdout)["paired"]


NOTHING = Answer(start_s=9.0, end_s=9.0, input_tokens=1, output_tokens=0)

REFUSED: dict[str, tuple[str, Document, str]] = {
    "no requests in it": ("vllm bench serve", {"request_throughput": 1.0}, "--save-detailed"),
    "another tool": ("other", {"results": []}, "GuideLLM, AIPerf or inference-perf"),
    "several benchmarks": (
        "GuideLLM", {"benchmarks": 2 * guidellm(REQUESTS)["benchmarks"]}, "--benchmark",
    ),
    "one request": ("inference-perf", inference_perf(REQUESTS[:1]), "two requests"),
    "a field is gone": (
        "inference-perf", [{"start_time": 1.0, "info": {}, "error": None}] * 2, "the fields of",
    ),
    "times fall": (
        "inference-perf",
        inference_perf((*REQUESTS, Answer(start_s=9.0, end_s=9.0, input_tokens=1, output_tokens=2,
                                          chunk_s=(9.2, 9.1)))),
        "request 41",
    ),
    "an answer of nothing": (
        "inference-perf",
        inference_perf((*REQUESTS, NOTHING)),
        "or an error",
    ),
    "columns of other lengths": (
        "vllm bench serve", {**vllm_bench(REQUESTS), "ttfts": [0.1]}, "ValueError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_says_where_and_why(case: str, tmp_path: Path) -> None:
    tool, document, says = REFUSED[case]
    results = written(tmp_path, tool, document)
    done = loadtest("import", results, plan_json(make_plan(), tmp_path), "-o", tmp_path / "run")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_one_of_several_benchmarks_is_chosen(tmp_path: Path) -> None:
    two = {"benchmarks": [*guidellm(REQUESTS)["benchmarks"], *guidellm(REQUESTS[:9])["benchmarks"]]}
    file = written(tmp_path, "GuideLLM", two)
    assert len(read_answers(file, benchmark=2)) == 9
    with pytest.raises(InputError, match="from 1 to 2"):
        read_answers(file, benchmark=3)
