"""Slips of unit, contradictions and broken files: one line, or an answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sizing.conftest import Sizing

SCENARIO = "llama-3.1-8b-h100"
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "arguments"),
    [
        ("deep.toml", f"a={DEEP}".encode(), ("plan", "FILE")),
        ("nul.toml", bytes(100), ("plan", "FILE")),
        ("utf-16.toml", "[model]\nid = 'x'".encode("utf-16"), ("plan", "FILE")),
        ("snowman.toml", "[model]\nid = '☃'".encode(), ("plan", "FILE")),
        ("deep.json", DEEP.encode(), ("losses", "FILE")),
        ("deep.json", DEEP.encode(), ("explain", "FILE")),
        ("deep.json", DEEP.encode(), ("plan", SCENARIO, "--calibration", "FILE")),
        ("bytes.json", bytes(range(256)), ("simulate", "FILE")),
    ],
)
def test_files_that_are_none(
    sizing: Sizing, name: str, content: bytes, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    done = sizing(*(str(path) if each == "FILE" else each for each in arguments))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"sizing: {path}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        ((f"workload.input_tokens={DEEP}",), 2, "workload.input_tokens"),
        (("workload.requests_per_s=1e30",), 2, "from 1e-06 to 1,000,000"),
        (("workload.requests_per_s=nan",), 2, "finite"),
        (("workload.input_tokens=1000000000000",), 2, "from 1 to 100,000,000"),
        (("slo.percentile=p101",), 2, "one of p50, p90, p95, p99"),
        (("search.confidence_fraction=1",), 2, "from 0.5 to 0.99"),
        (("search.pools=mixed", "search.local_threshold_tokens=100"), 2, "expected 0 with"),
        (("search.layouts=[]",), 2, "search.layouts"),
        (("workload.requests_per_s=1e5",), 3, "nearest miss: --mixed"),
        (("slo.ttft_s=1e-6",), 3, "no number of h100-sxm holds the SLO"),
        (("slo.tpot_s=0.001",), 3, "TPOT p99 of a request without any load is already"),
        (("cluster.max_gpus=1",), 3, ", missed by "),
    ],
)
def test_numbers_that_cannot_be(
    sizing: Sizing, overrides: tuple[str, ...], code: int, said: str
) -> None:
    """Slips of unit and contradictions are refused; what is too much is a no with its nearest."""
    keys = [part for each in overrides for part in ("--set", each)]
    done = sizing("plan", SCENARIO, *keys)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert done.err.count("\n") == (1 if code == 2 else 3)


@pytest.mark.parametrize("pools", ["split", "mixed"])
def test_answers_of_one_token(sizing: Sizing, pools: str, tmp_path: Path) -> None:
    """No gap follows the only token; the plan is made, drawn, simulated and explained."""
    path, page = str(tmp_path / "plan.json"), str(tmp_path / "plan.html")
    keys = ("--set", "workload.output_tokens=1", "--set", f"search.pools={pools}")
    assert sizing("plan", SCENARIO, *keys, "-o", path, "--html", page).code == 0
    assert sizing("explain", path).code == 0
    done = sizing("simulate", path, "--requests", "500", "--json")
    assert done.code == 0
    assert "ttft" in json.loads(done.out)["latencies"]
