"""Slips of unit, contradictions and broken files: one line, or an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sizing.report import plan_page
from tests.sizing.conftest import QUICK, Sizing

SCENARIO = QUICK[0]
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


@pytest.mark.parametrize("pools", ["split", "mixed"])
def test_answers_of_one_token(
    sizing: Sizing, pools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gap follows the only token; the plan is made, drawn, simulated and explained."""
    monkeypatch.setattr(plan_page, "REQUESTS", 500)
    path, page = str(tmp_path / "plan.json"), str(tmp_path / "plan.html")
    keys = ("--set", "workload.output_tokens=1", "--set", f"search.pools={pools}")
    assert sizing("plan", *QUICK, *keys, "-o", path, "--html", page).code == 0
    assert sizing("explain", path).code == 0
    done = sizing("simulate", path, "--requests", "500", "--json")
    assert done.code == 0
    assert "ttft" in json.loads(done.out)["latencies"]
