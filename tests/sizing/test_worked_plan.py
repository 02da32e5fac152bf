"""The plan that docs/model.md computes by hand, beside the plan that the code makes."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from minicluster.plan import Plan
from sizing.planner import bounds
from sizing.planner.explanation import Explanation, explain_plan
from sizing.planner.plan import plan
from sizing.planner.predict import planned_models
from sizing.scenario import Scenario

MODEL = Path(__file__).parents[2] / "docs" / "model.md"
LINE = re.compile(r"`([^`]+) = ([\d,.]+)`(?: (TFLOP|GB|MB|µs|ms|bytes)\b)?")
SCALE = {"TFLOP": 1e12, "GB": 1e9}
"""What the right side of a line is a multiple of, where the left side is in plain units."""


def section() -> str:
    text = MODEL.read_text(encoding="utf-8")
    return text[text.index("## A plan by hand") : text.index("## Terms")]


def value(expression: str) -> float:
    """Evaluate a line's left side."""
    python = re.sub(r"(?<=\d),(?=\d{3})", "", expression).replace("·", "*").replace("\u2212", "-")
    for marks, function in (("⌈⌉", "math.ceil"), ("⌊⌋", "math.floor")):
        python = python.replace(marks[0], f"{function}(").replace(marks[1], ")")
    assert re.fullmatch(r"(?:math\.(?:ceil|floor)|[\d.e*/+() -])+", python), python
    return float(eval(python, {"math": math}))  # noqa: S307  (matched above)


@cache
def made() -> tuple[Plan, Explanation]:
    """Return the plan of the scenario, and its terms."""
    answer = plan(Scenario.load("llama-3.1-8b-h100"))
    return answer, explain_plan(answer)


@pytest.mark.parametrize("line", LINE.findall(section()), ids=lambda line: line[0][:30])
def test_a_line_is_calculated_right(line: tuple[str, str, str]) -> None:
    """To the digits that stand there."""
    left, right, unit = line
    number = Decimal(right.replace(",", ""))
    exact = value(left) / SCALE.get(unit, 1.0)
    step = 10.0 ** int(number.as_tuple().exponent)
    assert abs(exact - float(number)) <= 0.5001 * step


def test_the_lines_end_at_the_plans_numbers() -> None:
    """What `sizing plan` and `sizing explain` print stands on a line of its equation."""
    answer, explained = made()
    memory, predicted = explained.memory, answer.prediction
    seconds = {(term.of, term.name): term.seconds for term in explained.terms}
    sums = {
        of: sum(value for (step, _), value in seconds.items() if step == of)
        for of in ("prefill step", "decode step", "TTFT")
    }
    [pool] = memory.pools
    models, chosen = planned_models(answer)
    load = models.load(chosen)
    steady_s = {replicas: bounds.steady_decode(load, replicas) for replicas in (2, 3)}
    ttft, tpot = predicted.ttft, predicted.tpot
    assert ttft.high_factor is not None
    assert tpot.high_factor is not None
    alone = float(bounds.unloaded_s(load)["ttft"].mean())
    ends = {
        "P1": f"{memory.parameters:,}`",
        "M1": f"{pool.parts_bytes['weights']:,.0f}`",
        "M2": f"{pool.kv_bytes_per_token:,.0f}`",
        "M4": f"{pool.parts_bytes['KV cache']:,.0f}`",
        "M12": f"{pool.sequences[2150]}`",
        "R2, the op": f"{1e6 * seconds['prefill step', 'qkv']:,.0f}`",
        "S2": f"{1e3 * sums['prefill step']:.1f}`",
        "R5": f"{1e6 * seconds['decode step', 'attention decode']:,.0f} with",
        "S3": f"{1e3 * sums['decode step']:.2f}`",
        "T4": f"{1e3 * alone:.1f}`",
        "T6, TPOT": f"{1e3 * steady_s[3][0]:.2f}`",
        "Q,": f"{1e3 * tpot.mean_s:.1f} ms",
        "Q5": f"{1e3 * ttft.mean_s:.1f}`",
        "L4, TTFT": f"{1e3 * ttft.p99_s * ttft.high_factor:.1f}`",
        "L4, TPOT": f"{1e3 * tpot.p99_s * tpot.high_factor:.1f}`",
        "T6 with": f"{1e3 * steady_s[2][0]:.1f}`",
    }
    lines = {
        name: next(line for line in section().splitlines() if line.startswith(f"- {name}"))
        for name in ends
    }
    assert {name: line for name, line in lines.items() if ends[name] not in line} == {}
    assert f"**{answer.cost.gpus} GPUs**" in section()
