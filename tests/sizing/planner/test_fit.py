"""Does it fit? Memory adds up, sequences fit in it, and more GPUs never hold fewer."""

from __future__ import annotations

import json

import pytest

from minicluster.engine_model.kv_cache import kv_bytes_per_token
from minicluster.specs.slicing import Slicing
from sizing.catalog import find_gpu, find_model
from sizing.planner.studies.fit import fit
from tests.sizing.conftest import Sizing

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "gpt-oss-120b", "deepseek-v3")
CONTEXT = 4096


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", ["h100-sxm", "h200-sxm", "l40s"])
def test_memory_adds_up_and_holds_the_sequences(model: str, gpu: str) -> None:
    found = fit(model, gpu, 8, context_tokens=CONTEXT)
    whole = find_gpu(gpu).require("hbm_bytes")
    for each in found.layouts:
        assert sum(each.parts_bytes.values()) == pytest.approx(whole)
        assert each.replicas * each.gpus <= found.gpus
        assert (each.batch == 0) == (each.why_not is not None)
        if each.batch:
            assert each.parts_bytes["KV cache"] > 0
    plain = {each.layout: each for each in found.layouts}["TP8"]
    per_token = kv_bytes_per_token(find_model(model), slicing=Slicing(tp=8))
    assert plain.batch * CONTEXT * per_token <= max(0.0, plain.parts_bytes["KV cache"])


@pytest.mark.parametrize("model", MODELS)
def test_more_gpus_and_shorter_sequences_hold_no_fewer(model: str) -> None:
    def held(gpus: int, tokens: int) -> int:
        best = fit(model, "h100-sxm", gpus, context_tokens=tokens).best
        return 0 if best is None else best.batch

    counts = [held(gpus, CONTEXT) for gpus in (1, 2, 4, 8, 16)]
    assert counts == sorted(counts)
    assert held(8, 2 * CONTEXT) <= held(8, CONTEXT)


def test_smaller_weights_leave_more(sizing: Sizing) -> None:
    """`--set` takes keys of the model and the engine; the exit code is 3 where nothing fits."""
    command = ("fit", "llama-3.1-70b", "--gpu", "h100-sxm", "--gpus", "1", "--json")
    plain, quantised = sizing(*command), sizing(*command, "--set", "model.weight_dtype=fp8")
    assert (plain.code, quantised.code) == (3, 0)
    assert json.loads(plain.out)["best"] is None
    answer = json.loads(quantised.out)
    assert answer["best"] in answer["layouts"]
    assert answer["best"]["batch"] > 0
    weights = [json.loads(each.out)["layouts"][0]["parts_bytes"]["weights"]
               for each in (plain, quantised)]  # fmt: skip
    assert weights[1] == pytest.approx(weights[0] / 2, rel=0.05)
