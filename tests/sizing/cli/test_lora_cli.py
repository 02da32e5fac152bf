"""LoRA adapters from a scenario's keys to the plan, its files for other stacks, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from minicluster.plan import read_plan, to_json
from tests.sizing.conftest import QUICK, Sizing

ADAPTERS = ("--set", "workload.lora_adapters=12", "--set", "workload.lora_popularity_exponent=1")
SLOTS = ("--set", "engine.max_loras=12")


def test_a_plan_carries_them_and_commands_show_them(
    sizing: Sizing, plan_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Memory and terms in the explanation, copies in the simulation, settings in every export."""
    file = plan_of(*QUICK, *ADAPTERS, *SLOTS)
    plan = read_plan(file)
    assert plan.engine.lora == plan.inputs.engine.lora
    assert to_json(plan) == file.read_text()
    without = read_plan(plan_of(*QUICK))
    assert "lora" not in to_json(without)
    assert plan.pool("prefill").kv_bytes < without.pool("prefill").kv_bytes
    explained = sizing("explain", str(file)).out
    assert "(M10)" in explained
    assert "LoRA gate up expand" in explained
    run = json.loads(sizing("simulate", str(file), "--requests", "2000", "--json").out)
    assert 0 < run["adapter_loads_per_request"] < 1
    for target, flag in (
        ("vllm", "--max-loras 12"), ("sglang", "--max-loras-per-batch 12"),
        ("trtllm", "max_loras: 12"), ("ray", "max_loras: 12"), ("kserve", "--max-loras 12"),
    ):  # fmt: skip
        assert flag in sizing("export", str(file), "--to", target).out
    script = tmp_path / "vllm.sh"
    script.write_text(sizing("export", str(file), "--to", "vllm").out)
    read = sizing("read", str(script), "--scenario", QUICK[0], *ADAPTERS, "--json")
    assert read.code == 0, read.err


def test_a_rank_above_the_model_is_refused(sizing: Sizing, tmp_path: Path) -> None:
    """A model of 256 values a token has no adapter of rank 320."""
    config = {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
        "vocab_size": 1000, "max_position_embeddings": 8192, "hidden_act": "silu",
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--set", f"model.id={tmp_path}", "--set", "engine.max_lora_rank=320")
    done = sizing("plan", "llama-3.1-8b-h100", *words, *ADAPTERS, *SLOTS)
    assert done.code == 2
    assert "at most 256" in done.err


def test_more_slots_than_memory_takes_is_no_plan(sizing: Sizing) -> None:
    """The reason names the bytes of the slots."""
    words = ("--set", "engine.max_loras=1000", "--set", "engine.max_lora_rank=64")
    done = sizing("plan", "llama-3.1-8b-h100", *ADAPTERS, *words, "--set", "search.tp=[1]")
    assert done.code == 3
    assert "GB of slots for LoRA adapters" in done.err
    assert "fewer engine.max_loras" in done.err


def test_classes_share_the_adapters(sizing: Sizing, tmp_path: Path) -> None:
    """Each class's requests name them by the same popularity, in pools of its own as well."""
    scenario = tmp_path / "two.toml"
    scenario.write_text(
        """
        [model]
        id = "llama-3.1-8b"
        [cluster]
        preset = "h100-8"
        [workload]
        lora_adapters = 12
        [[workload.classes]]
        name = "chat"
        requests_per_s = 3.0
        input_tokens = 500
        output_tokens = 100
        [[workload.classes]]
        name = "batch"
        requests_per_s = 3.0
        input_tokens = 2000
        output_tokens = 100
        [search]
        class_pools = "own"
        confidence_fraction = 0.5
        [engine]
        max_loras = 12
        """
    )
    done = sizing("plan", str(scenario), "-o", str(tmp_path / "plan.json"))
    assert done.code == 0, done.err
    for path in tmp_path.glob("plan*.json"):
        assert read_plan(path).workload.lora_adapters == 12
