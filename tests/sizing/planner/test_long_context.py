"""One long prompt in an empty system: the talk's sizes, and what the whole model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicluster.plan import Inputs
from sizing.cli.studies import parse_slicing
from sizing.latency.op import prefill_load
from sizing.latency.step import stage_s
from sizing.latency.term import Machine
from sizing.planner.studies.long_context import (
    BUBBLE,
    LongPrompt,
    chunked_prefill,
    find_rule,
    long_prompt,
)
from sizing.scenario import Scenario
from tests.sizing.conftest import Sizing

LENGTHS = (32_768, 65_536, 100_000, 131_072)
LAYOUTS = tuple(
    parse_slicing(each) for each in ("TP8", "TP16", "TP4xPP3", "TP8xPP2", "TP8xPP4", "TP8xPP8")
)
PARTS = ("matrix multiplications", "attention", "elementwise", "collectives", "engine")


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    """Return the shipped scenario."""
    return Scenario.load(Path("llama-2-70b-long"))


@pytest.fixture(scope="module")
def prompts(inputs: Inputs) -> dict[int, LongPrompt]:
    """Return both answers for the four lengths."""
    rule = find_rule("talk")
    return {tokens: long_prompt(inputs, tokens, LAYOUTS, rule) for tokens in LENGTHS}


def test_pipeline_beats_flat_slicing_across_nodes(prompts: dict[int, LongPrompt]) -> None:
    """At 32K on 16 GPUs, sending to the next stage costs less than all-reduces over nodes."""
    at = {each.layout: each for each in prompts[32_768].layouts}
    assert at["TP8xPP2"].ttft_s < 0.85 * at["TP16"].ttft_s
    assert at["TP16"].parts_s["collectives"] > 2 * at["TP8xPP2"].parts_s["collectives"]
    assert at["TP8xPP2"].parts_s[BUBBLE] > 0 == at["TP16"].parts_s[BUBBLE]
    assert at["TP8xPP8"].ttft_s < at["TP8xPP4"].ttft_s < at["TP8xPP2"].ttft_s < at["TP8"].ttft_s


def test_collectives_between_nodes_decide_decode(prompts: dict[int, LongPrompt]) -> None:
    """70B: TP16 reads less in the same time, NCCL loses more than that, MSCCL++ does not."""
    for found in prompts.values():
        at = {each.layout: each for each in found.layouts}
        flat, piped = at["TP16"], at["TP8xPP2"]
        more = {name: flat.tpot_parts_s[name] - piped.tpot_parts_s[name] for name in PARTS}
        assert more["matrix multiplications"] < 0 < more["collectives"]
        assert flat.tpot_s - piped.tpot_s == pytest.approx(sum(more.values()))
        # 160 all-reduces of 16 KiB: 16.8 us by MSCCL++ instead of 45.5 us (configs/collectives).
        [(library, faster_s)] = flat.tpot_by_library_s.items()
        assert library == "mscclpp"
        by_hand_s = 160 * (45.5e-6 - 16.8e-6)
        assert flat.tpot_s - faster_s == pytest.approx(by_hand_s, rel=0.03)
        assert faster_s < piped.tpot_s < flat.tpot_s
        assert not piped.tpot_by_library_s


@pytest.mark.parametrize(("tokens", "layout"), [(32_768, "TP8xPP4"), (8192, "TP2"), (700, "TP8")])
def test_chunks_flow_through_stages(inputs: Inputs, tokens: int, layout: str) -> None:
    """The closed form of eq. S8 is the makespan of chunks that pass the stages one by one."""
    on, slicing = Machine.of(inputs), parse_slicing(layout)
    found = chunked_prefill(on, tokens, slicing=slicing)
    size = tokens / found.chunks
    stage = stage_s(
        on,
        prefill_load(np.full(found.chunks, size), np.arange(found.chunks) * size),
        slicing=slicing,
    )
    free = np.zeros(slicing.pp)
    for seconds in stage:
        ready = 0.0
        for at in range(slicing.pp):
            ready = free[at] = max(ready, free[at]) + seconds
    assert found.seconds == pytest.approx(free[-1], rel=1e-9)
    assert sum(found.parts_s.values()) == pytest.approx(found.seconds)
    assert size <= on.engine.prompt_tokens_per_step


def test_the_fewest_gpus_may_be_the_whole_budget(inputs: Inputs) -> None:
    """
    On one node of 8 GPUs, the TTFT limit decides: TP4 holds a loose one and TP8 a tighter one.

    No layout holds a limit below the TTFT of TP8.
    """
    rule = find_rule("talk")
    wide, narrow = long_prompt(
        inputs, 4096, [parse_slicing(each) for each in ("TP8", "TP4")], rule
    ).layouts
    limits_s = (narrow.ttft_s, (wide.ttft_s + narrow.ttft_s) / 2, 0.9 * wide.ttft_s)
    found = [
        long_prompt(
            Scenario.load("llama-2-70b-long", {"cluster.max_gpus": 8, "slo.ttft_s": limit_s}),
            4096,
            (),
            rule,
        ).fewest
        for limit_s in limits_s
    ]
    assert [each and each.layout for each in found] == ["TP4", "TP8", None]


def test_command(sizing: Sizing) -> None:
    """The table names the rule, the difference and the assumption; JSON is data only."""
    code, out, _ = sizing("long-context")
    assert code == 0
    for word in ("TP8xPP2", "> 64", "pipeline bubble", "50% of the dense peak", "Assumption"):
        assert word in out, word
    assert "more for collectives" in out
    assert "decode would prefer TP16" in out
    done = sizing("long-context", "--tokens", "32768", "--slicing", "tp8,TP4xPP2", "--json")
    assert done.code == 0
    document: dict[str, Any] = json.loads(done.out)
    assert [each["layout"] for each in document["prompts"][0]["layouts"]] == ["TP8", "TP4xPP2"]
    assert document["assumed_context_tokens"] == 140_000
