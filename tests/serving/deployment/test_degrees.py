"""Degrees that we take are those at which vLLM builds its layers, of every model of the catalog."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.engine_model.parallelism import expert_rule, tp_rule
from minicluster.specs.model import LinearSpec, ModelSpec, MoeSpec
from minicluster.specs.slicing import Slicing
from sizing import catalog

if TYPE_CHECKING:
    from tests.serving.forks import Forks

DRIVER = Path(__file__).with_name("vllm_degrees.py")

BLOCKS = {"weight_dtype": "fp8", "weight_group": 128, "weight_format": "fp8", "block_scaled": True}
COMPRESSED = {**BLOCKS, "weight_format": "compressed-tensors"}
AWQ = {"weight_dtype": "int4", "weight_group": 128, "weight_format": "awq"}
GPTQ = {**AWQ, "weight_format": "gptq"}
INT4 = {**AWQ, "weight_format": "compressed-tensors"}
INT8 = {**INT4, "weight_dtype": "int8"}
NVFP4 = {"weight_dtype": "fp4", "weight_group": 16, "weight_format": "modelopt"}
CHANNELS = {"weight_dtype": "int8", "weight_format": "compressed-tensors"}
SPARSE = MoeSpec(
    num_experts=128, experts_per_token=8, expert_ffn_size=768, num_shared_experts=1,
    shared_ffn_size=512,
)  # fmt: skip
DELTA = LinearSpec(
    num_layers=24, num_key_heads=16, num_value_heads=48, key_head_dim=128, value_head_dim=128
)
MAMBA = LinearSpec(
    num_layers=24, num_key_heads=8, num_value_heads=96, key_head_dim=128, value_head_dim=64,
    kind="mamba2", conv_kernel=4,
)  # fmt: skip
LLAMA = "llama-3.1-8b"

MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "a vocabulary of 151,936 + 5": (LLAMA, {"vocab_size": 151_941, "num_heads": 60,
                                            "num_kv_heads": 60, "ffn_size": 14_400}),
    "a vocabulary of 49,155": (LLAMA, {"vocab_size": 49_155, "num_heads": 24, "num_kv_heads": 6}),
    "blocks in a feed-forward": (LLAMA, {**BLOCKS, "ffn_size": 9_728}),
    "blocks of an up-projection alone": (LLAMA, {**BLOCKS, "ffn_size": 9_728, "gated_mlp": False}),
    "blocks over heads of 64": (LLAMA, {**BLOCKS, "head_dim": 64}),
    "blocks but for feed-forwards": (LLAMA, {**BLOCKS, "ffn_size": 9_728,
                                             "dense_quantised": False}),
    "one scale a tensor": (LLAMA, {"weight_dtype": "fp8", "weight_format": "fp8",
                                   "ffn_size": 9_728}),
    "latent heads of 192": ("deepseek-v3", {**BLOCKS, "num_heads": 64, "num_kv_heads": 64}),
    "latent heads, plain": ("deepseek-v3", {"num_heads": 64, "num_kv_heads": 64}),
    "compressed blocks": ("deepseek-v3", {**COMPRESSED}),
    "compressed blocks, 8 KV heads of 64": (LLAMA, {**COMPRESSED, "head_dim": 64,
                                                    "hidden_size": 2048}),
    "compressed blocks, one KV head of 64": (LLAMA, {**COMPRESSED, "head_dim": 64,
                                                     "num_kv_heads": 1}),
    "compressed blocks, odd feed-forward": (LLAMA, {**COMPRESSED, "ffn_size": 9_728 + 64}),
    "compressed blocks, one up-projection": (LLAMA, {**COMPRESSED, "ffn_size": 9_728 + 64,
                                                     "gated_mlp": False}),
    "compressed blocks, linear layers": (LLAMA, {**COMPRESSED, "linear": DELTA}),
    "compressed blocks, narrow keys": (LLAMA, {**COMPRESSED,
                                               "linear": replace(DELTA, key_head_dim=96)}),
    "compressed blocks, attention plain": (LLAMA, {**COMPRESSED, "head_dim": 64,
                                                   "attention_quantised": False}),
    "AWQ, 231 groups": (LLAMA, {**AWQ, "ffn_size": 29_568, "num_heads": 64}),
    "AWQ, 232 groups": (LLAMA, {**AWQ, "ffn_size": 29_696, "num_heads": 64}),
    "AWQ, groups of 64": (LLAMA, {**AWQ, "ffn_size": 11_008, "weight_group": 64}),
    "GPTQ, 231 groups": (LLAMA, {**GPTQ, "ffn_size": 29_568, "num_heads": 64}),
    "GPTQ, groups of 32": (LLAMA, {**GPTQ, "ffn_size": 18_944, "weight_group": 32,
                                   "num_heads": 28, "num_kv_heads": 4}),
    "int4, 86 groups": (LLAMA, {**INT4, "ffn_size": 11_008}),
    "int8, 148 groups": (LLAMA, {**INT8, "ffn_size": 18_944, "num_heads": 28, "num_kv_heads": 4}),
    "int8, channels": (LLAMA, {**CHANNELS, "ffn_size": 18_944}),
    "NVFP4": (LLAMA, {**NVFP4, "ffn_size": 11_008 + 8}),
    "NVFP4, thin slices": (LLAMA, {**NVFP4, "ffn_size": 4_864, "head_dim": 80}),
    **{
        f"experts in {name}": (
            LLAMA, {"moe": SPARSE, "ffn_size": 0, "hidden_size": 2048, **changes}
        )
        for name, changes in {
            "blocks": BLOCKS, "blocks, odd hidden": {**BLOCKS, "hidden_size": 2064},
            "compressed blocks": COMPRESSED, "AWQ": AWQ, "GPTQ": GPTQ, "compressed int4": INT4,
            "AWQ, odd hidden": {**AWQ, "hidden_size": 2112, "attention_quantised": False,
                                "shared_quantised": False},
            "16 bits": {},
        }.items()
    },
    "linear layers": (LLAMA, {"linear": DELTA, "num_heads": 24, "num_kv_heads": 4}),
    "linear layers in blocks": (LLAMA, {**BLOCKS, "linear": replace(DELTA, value_head_dim=64)}),
    "Mamba-2": (LLAMA, {"linear": MAMBA}),
    "Mamba-2, one group": (LLAMA, {"linear": replace(MAMBA, num_key_heads=1)}),
}  # fmt: skip


def models() -> dict[str, ModelSpec]:
    """Return the catalog and the models made, without draft heads, which are models themselves."""
    found = {name: catalog.find_model(name) for name in catalog.models()}
    made = {name: replace(found[base], **changes) for name, (base, changes) in MADE.items()}
    return {name: replace(each, draft=None) for name, each in {**found, **made}.items()}


def case_of(model: ModelSpec) -> dict[str, Any]:
    """Return what the driver builds."""
    return {
        "format": model.weight_format, "dtype": model.weight_dtype, "group": model.weight_group,
        "hidden": model.hidden_size, "heads": model.num_heads, "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "vocabulary": model.vocab_size, "ffn": model.ffn_size,
        "gated": model.gated_mlp, "attends": model.num_attention_layers > 0,
        "expert": model.moe.expert_ffn_size if model.moe else 0,
        "shared": model.moe.shared_ffn_size if model.moe else 0,
        "mla": model.mla and asdict(model.mla), "linear": model.linear and asdict(model.linear),
        "attention_quantised": model.attention_quantised,
        "dense_quantised": model.dense_quantised, "shared_quantised": model.shared_quantised,
    }  # fmt: skip


@pytest.fixture(scope="module")
def refusals(
    tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> dict[str, list[dict[str, bool]]]:
    """Return what vLLM refuses of each model at degrees 1 to 64."""
    folder = tmp_path_factory.mktemp("vllm")
    given, answered = folder / "cases.json", folder / "answers.json"
    known = models()
    given.write_text(json.dumps([case_of(each) for each in known.values()]), encoding="utf-8")
    forks.run(DRIVER.read_text(encoding="utf-8"), str(given), str(answered))
    return dict(zip(known, json.loads(answered.read_text(encoding="utf-8")), strict=True))


@pytest.mark.parametrize("name", models())
def test_degrees_are_those_of_vllm(name: str, refusals: dict[str, list[dict[str, bool]]]) -> None:
    """TP by itself, and of experts and shared ones."""
    model, ours, theirs = models()[name], [], []
    for tp, refused in enumerate(refusals[name], 1):
        theirs.append((tp, refused["tp"], any(refused.get(n) for n in ("experts", "shared"))))
        experts = expert_rule(model, Slicing(tp=tp)) is not None
        ours.append((tp, tp_rule(model, tp) is not None, experts))
    assert ours == theirs
