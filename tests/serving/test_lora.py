"""Adapters of one model behind one endpoint: split pools of vLLM on two cores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest

from minicluster.specs.lora import ATTENTION_MODULES, MODULES, LoraSpec, adapter_bytes

from .adapters import RANK, make_adapter
from .client import send
from .command import serving
from .deployed import Shared, up
from .forks import Forks
from .plans import make_deployment, make_plan

pytestmark = pytest.mark.engine

BUFFERS = """
import os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
slots, rank, *modules = sys.argv[2:]
engine = LLM(
    sys.argv[1], enable_lora=True, max_loras=int(slots), max_lora_rank=int(rank),
    lora_target_modules=modules, enforce_eager=True, max_model_len=256,
    kv_cache_memory_bytes=1 << 26, dtype="bfloat16",
).llm_engine
worker = engine.model_executor.driver_worker
runner = getattr(worker, "worker", worker).model_runner
layers = runner.lora_manager._adapter_manager.modules.values()
slots = [each for layer in layers for each in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
print("bytes", sum(each.numel() * each.element_size() for each in slots))
"""


@pytest.mark.parametrize("modules", [MODULES, ATTENTION_MODULES])
def test_slots_are_as_large_as_those_of_vllm(
    small_model: Path, forks: Forks, modules: tuple[str, ...]
) -> None:
    """Bytes follow from all modules, or from those of attention; tables have none."""
    lora = LoraSpec(
        max_loras=3, max_lora_rank=8, max_cpu_loras=3, adapters=3, target_modules=modules
    )
    model = make_deployment(small_model).model
    planned = lora.max_loras * adapter_bytes(lora, model, tp=1, layers=model.num_layers)
    assert f"bytes {planned:.0f}" in forks.run(BUFFERS, str(small_model), "3", "8", *modules)


def test_two_adapters_answer_differently_through_one_endpoint(
    tmp_path: Path, demo_model: Path, shared: Shared
) -> None:
    """
    The model's name chooses the adapter in both pools, and others are unknown.

    One slot for two adapters: each request copies its own.
    """
    shared.end()
    adapters = {
        name: make_adapter(tmp_path / name, demo_model, seed=seed)
        for seed, name in enumerate(("red", "blue"))
    }
    deployment = make_deployment(demo_model, dtype="fp32")
    lora = LoraSpec(max_loras=1, max_lora_rank=RANK, max_cpu_loras=2, adapters=2)
    plan = make_plan(replace(deployment, engine=replace(deployment.engine, lora=lora)))
    options = [word for name in adapters for word in ("--lora-modules", f"{name}={adapters[name]}")]
    with up(tmp_path, plan, *options) as base_url:
        body = {"prompt": list(range(2400, 2500)), "max_tokens": 12, "temperature": 0}
        said = {}
        for name in ("demo", "red", "blue", "demo", "red"):
            reply = send(f"{base_url}/v1/completions", body | {"model": name})
            assert reply.done, reply
            assert reply.body["model"] == name
            assert reply.path == "remote"
            text = reply.body["choices"][0]["text"]
            assert said.setdefault(name, text) == text
        assert len(set(said.values())) == 3
        unknown = send(f"{base_url}/v1/completions", body | {"model": "green"})
        assert (unknown.status, unknown.body["error"]["code"]) == (404, "model_not_found")
        with urlopen(f"{base_url}/v1/models") as listed:  # noqa: S310  (http)
            assert [each["id"] for each in json.load(listed)["data"]] == ["demo", "red", "blue"]
        verify = serving(tmp_path, "verify", "--json")
        assert json.loads(verify.stdout)["differences"] == []
