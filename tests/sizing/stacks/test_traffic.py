"""Traffic of logs, metrics and conversations: rates, lengths, holes, and what is refused."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicluster.errors import InputError
from minicluster.workload.traces import read_trace
from sizing.stacks.traffic import read_traffic
from tests.sizing.conftest import Sizing

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
RNG = np.random.default_rng(3)
DUE = np.cumsum(RNG.exponential(0.5, 2000))
PROMPTS = np.maximum(1, RNG.lognormal(7.0, 0.5, 2000)).astype(int)
ANSWERS = np.maximum(1, RNG.lognormal(5.0, 0.3, 2000)).astype(int)
TOOK = RNG.uniform(0.5, 9.0, 2000)


def log_lines(hole_s: float = 0.0) -> list[str]:
    """Return an access log in the order in which answers end, with health checks in it."""
    due = DUE + np.where(np.arange(2000) >= 1000, hole_s, 0.0)
    ended = due + TOOK
    lines = [
        (
            ended[at],
            {
                "time": (BEGIN + timedelta(seconds=float(ended[at]))).isoformat(),
                "seconds": float(TOOK[at]),
                "status": 200,
                "prompt_tokens": int(PROMPTS[at]),
                "output_tokens": int(ANSWERS[at]),
            },
        )
        for at in range(2000)
    ]
    lines += [
        (second, {"time": BEGIN.isoformat(), "route": "/health", "status": 200})
        for second in range(0, 900, 30)
    ]
    return [json.dumps(record) for _, record in sorted(lines, key=lambda line: line[0])]


def spans() -> str:
    """Return the same requests as one OTLP document."""
    begin_ns = int(BEGIN.timestamp() * 1e9)

    def attribute(key: str, value: int) -> dict[str, Any]:
        return {"key": f"gen_ai.usage.{key}", "value": {"intValue": str(value)}}

    found = [
        {
            "startTimeUnixNano": str(begin_ns + int(DUE[at] * 1e9)),
            "attributes": [
                attribute("input_tokens", int(PROMPTS[at])),
                attribute("output_tokens", int(ANSWERS[at])),
            ],
        }
        for at in range(2000)
    ]
    document = {
        "resourceSpans": [{"scopeSpans": [{"spans": [*found, {"startTimeUnixNano": "1"}]}]}]
    }
    return json.dumps(document, indent=1)


@pytest.mark.parametrize("kind", ["log", "spans"])
def test_a_log_is_the_arrivals_that_made_it(tmp_path: Path, kind: str) -> None:
    """Arrival is the end less the time that it took; what is no request is left out."""
    file = tmp_path / "access.log"
    file.write_text(spans() if kind == "spans" else "\n".join(log_lines()))
    read = read_trace(file)
    assert read.skipped == (1 if kind == "spans" else 30)
    np.testing.assert_allclose(read.arrivals.due_s, DUE - DUE[0], atol=1e-5)
    assert read.arrivals.input_tokens.tolist() == PROMPTS.tolist()
    assert read.arrivals.output_tokens.tolist() == ANSWERS.tolist()


@pytest.mark.parametrize("hole_s", [0.0, 7200.0])
def test_rates_do_not_count_holes(tmp_path: Path, hole_s: float) -> None:
    """Two hours without a line are a hole in the log, not slow traffic."""
    file = tmp_path / "access.log"
    file.write_text("\n".join(log_lines(hole_s)))
    found = read_traffic(file)
    assert found.mean_per_s == pytest.approx(2.0, rel=0.1)
    assert found.gap_cv == pytest.approx(1.0, abs=0.1)
    assert found.busiest_per_s is not None
    assert found.mean_per_s <= found.busiest_per_s < 2.6
    assert [round(seconds, -2) for _, seconds in found.holes] == ([7200] if hole_s else [])


def test_metrics_give_lengths_and_no_rate(tmp_path: Path) -> None:
    """Lengths lie within the buckets of vLLM's histograms, and have the mean of its sums."""
    bounds = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, math.inf]
    lines = []
    for name, values in (("prompt", PROMPTS), ("generation", ANSWERS)):
        for bound in bounds:
            le = "+Inf" if math.isinf(bound) else f"{bound:.1f}"
            count = int((values <= bound).sum())
            lines.append(f'vllm:request_{name}_tokens_bucket{{engine="0",le="{le}"}} {count}')
        lines.append(f'vllm:request_{name}_tokens_sum{{engine="0"}} {values.sum():.1f}')
    file = tmp_path / "metrics"
    file.write_text("\n".join(lines))
    found = read_traffic(file)
    assert found.requests == 2000
    assert found.mean_per_s is None
    assert "requests_per_s" not in found.to_toml()
    assert found.input_tokens.median == pytest.approx(math.exp(7.0), rel=0.15)
    prompts, answers, counts = np.array(found.lengths).T
    assert np.average(prompts, weights=counts) == pytest.approx(PROMPTS.mean(), rel=0.005)
    assert np.average(answers, weights=counts) == pytest.approx(ANSWERS.mean(), rel=0.005)
    assert abs(np.corrcoef(prompts, answers)[0, 1]) < 0.05  # the file does not tell them together


def test_conversations_grow(tmp_path: Path) -> None:
    """The prompt of an answer is all that came before it; a first turn of the model is none."""
    turns = [("gpt", "x" * 4), ("human", "x" * 36), ("gpt", "x" * 80), ("human", "x" * 40),
             ("gpt", "x" * 8)]  # fmt: skip
    talk = [{"from": who, "value": said} for who, said in turns]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": talk}]))
    found = read_traffic(file, characters_per_token=4)
    assert (found.requests, found.skipped) == (2, 1)
    assert (found.input_tokens.longest, found.output_tokens.longest) == (40, 20)
    for ratio in (None, math.nan, 0.0, 1e-300):
        with pytest.raises(InputError, match="--characters-per-token"):
            read_traffic(file, characters_per_token=ratio)


def test_bursts_of_one_second_are_a_load(tmp_path: Path) -> None:
    """Where all other gaps are 0, the time between bursts is no hole."""
    file = tmp_path / "access.log"
    rows = [
        {"time": f"2026-01-01T{hour}:00:00Z", "prompt_tokens": 5, "output_tokens": 5}
        for hour in ("10", "11")
        for _ in range(500)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_traffic(file).mean_per_s == pytest.approx(999 / 3600)


def test_a_trace_is_written_that_is_read_again(sizing: Sizing, tmp_path: Path) -> None:
    """The command prints the table; the file that it writes has the same arrivals."""
    log, out = tmp_path / "access.log", tmp_path / "trace.jsonl"
    log.write_text("\n".join(log_lines()))
    said = sizing("traffic", str(log), "-o", str(out))
    assert said.out.startswith("[workload]\nrequests_per_s = ")
    again = read_trace(out).arrivals
    np.testing.assert_allclose(again.due_s, DUE - DUE[0], atol=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"time": "x", "prompt_tokens": 1, "output_tokens": 1}', ":1 is"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', ":1 is"),
        ('{"route": "/health"}', "a trace without requests"),
        ('{"time": 1, "prompt_tokens": 1.5, "output_tokens": 1}\n', ":1 is"),
        ('vllm:request_prompt_tokens_bucket{le="1.0"} 0', "requests that were counted"),
        ('vllm:request_prompt_tokens_bucket{le="+Inf"} 1', "beyond the largest bucket"),
        ('vllm:request_prompt_tokens_bucket{le="1.0"} 1', "_tokens_sum is missing"),
        (
            'vllm:request_prompt_tokens_bucket{le="9.0"} 2\nvllm:request_prompt_tokens_sum 19',
            "it has to be a sum of 0 to 18 tokens",
        ),
        ('vllm:request_prompt_tokens_bucket{le="x"} 1', "it has to be numbers, as Prometheus"),
        ('vllm:request_prompt_tokens_bucket{le="1.0"} x', "it has to be numbers, as Prometheus"),
        (
            "\n".join(f'vllm:request_prompt_tokens_sum{{model_name="{m}"}} 9' for m in "ab"),
            "the metrics of a, b",
        ),
        ('{"resourceSpans": 3}', ":1 is"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": 1}]}]}]}', ":1 is"),
        ("[" * 50_000, "a list of"),
        ("[3]", "a list of"),
        ("", "an empty file"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """The message names the file, the line, and what was expected."""
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read_traffic(file, characters_per_token=4)
    assert message in str(refused.value)
