"""Sequences that fit in a KV cache are as many as vLLM's own manager takes in."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minicluster.engine_model.kv_cache import INDEX_SCALE_BYTES, KvPages, kv_pages
from minicluster.specs.model import DraftSpec, LinearSpec, ModelSpec
from minicluster.specs.slicing import Slicing
from sizing import catalog

if TYPE_CHECKING:
    from tests.serving.forks import Forks

DRIVER = Path(__file__).with_name("vllm_pages.py")
LONGEST, SHORT, STEP, MOST = 32_768, 1000, 2048, 200
LENGTHS = (100, 785, 1000, 5000, 20_000)
IN_CHUNKS = (*LENGTHS[:-1], 16_383)
"""Where windows are chunks of 8,192 tokens: we count the most that a sequence holds, its end."""

EAGLE = DraftSpec(
    method="eagle3", num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=8192, vocab_size=32_000
)
QWEN36 = LinearSpec(
    num_layers=48, num_key_heads=16, num_value_heads=48, key_head_dim=128, value_head_dim=128,
    conv_kernel=4,
)  # fmt: skip
NEMOTRON = LinearSpec(
    num_layers=24, num_key_heads=8, num_value_heads=128, key_head_dim=128, value_head_dim=64,
    conv_kernel=4, kind="mamba2",
)  # fmt: skip
LIGHTNING = LinearSpec(
    num_layers=28, num_key_heads=32, num_value_heads=32, key_head_dim=128, value_head_dim=128,
    kind="lightning",
)  # fmt: skip

MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.6-27B": ("qwen3-8b", {"num_layers": 64, "num_heads": 24, "num_kv_heads": 4,
                                 "head_dim": 256, "linear": QWEN36}),
    "Qwen3.6-27B, states in 16 bits": ("qwen3-8b", {
        "num_layers": 64, "num_heads": 24, "num_kv_heads": 4, "head_dim": 256,
        "linear": replace(QWEN36, state_dtype="bf16")}),
    "Gemma, 5 of 6 windows": ("llama-3.1-8b", {"num_layers": 62, "num_window_layers": 52,
                                               "window_tokens": 1024}),
    "Gemma, every other": ("llama-3.1-8b", {"num_layers": 46, "num_window_layers": 23,
                                            "window_tokens": 4096}),
    "windows, one more full": ("llama-3.1-8b", {"num_layers": 25, "num_window_layers": 12,
                                                "window_tokens": 128}),
    "attention beside states": ("llama-3.1-8b", {"linear": replace(NEMOTRON, num_layers=32),
                                                 "attention_layers": 32}),
    "few attention layers": ("llama-3.1-8b", {"num_layers": 52, "linear": NEMOTRON,
                                              "attention_layers": 4}),
    "lightning": ("llama-3.1-8b", {"linear": LIGHTNING}),
    "full, fp8 cache": ("llama-3.1-8b", {"kv_dtype": "fp8"}),
    "gpt-oss with a draft head": ("gpt-oss-120b", {"draft": EAGLE}),
    "full with a draft head": ("llama-3.1-8b", {"draft": replace(EAGLE, num_kv_heads=4)}),
    "windows with a small draft head": ("llama-3.1-8b", {
        "num_window_layers": 16, "window_tokens": 512,
        "draft": replace(EAGLE, num_kv_heads=4)}),
}  # fmt: skip
KNOWN = (
    "llama-3.1-8b", "mistral-7b", "gpt-oss-20b", "gpt-oss-120b", "llama-4-scout",
    "qwen3.5-397b-a17b", "deepseek-v3", "deepseek-v3.2", "glm-5", "qwen3-30b-a3b",
)  # fmt: skip
DEGREES = {"Qwen3.6-27B": (1, 2, 4, 8), "qwen3.5-397b-a17b": (1, 2, 8), "gpt-oss-120b": (1, 4)}


def models() -> dict[str, ModelSpec]:
    """Return models of every kind of cache; drafts only where they are named."""
    found = {name: replace(catalog.find_model(name), draft=None) for name in KNOWN}
    made = {name: (catalog.find_model(base), extra) for name, (base, extra) in MADE.items()}
    return found | {name: replace(base, **{"draft": None, **extra})
                    for name, (base, extra) in made.items()}  # fmt: skip


def lengths(case: dict[str, Any]) -> tuple[int, ...]:
    """Return the lengths of sequences that a model is filled with."""
    return IN_CHUNKS if case["chunked"] else LENGTHS


def cases() -> dict[tuple[str, int, int], tuple[KvPages, dict[str, Any]]]:
    """Return our blocks, and what the driver fills."""
    found = {}
    for name, model in models().items():
        for tp in DEGREES.get(name, (1,)):
            for drafts in (0, 2) if name == "Qwen3.6-27B" else (0,):
                pages = kv_pages(model, slicing=Slicing(tp=tp), block_size=16, drafts=drafts)
                found[name, tp, drafts] = (pages, case_of(model, tp, drafts))
    return found


def case_of(model: ModelSpec, tp: int, drafts: int) -> dict[str, Any]:
    """Return the layers of a model at a degree."""
    mla, draft = model.mla, model.draft
    return {
        "tp": tp, "drafts": drafts, "block_size": 16, "kv_dtype": model.kv_dtype,
        "kv_heads": max(1, model.num_kv_heads // tp), "head_dim": model.head_dim,
        "latent": mla.kv_lora_rank + mla.qk_rope_head_dim if mla else 0,
        "index": model.index.head_dim + INDEX_SCALE_BYTES if model.index else 0,
        "full": model.num_full_layers, "window": model.num_window_layers,
        "window_tokens": model.window_tokens, "chunked": model.chunked_window,
        "states": model.num_linear_layers, "linear": model.linear and asdict(model.linear),
        "draft": [[max(1, draft.num_kv_heads // tp), draft.head_dim]] if draft else [],
        "longest": LONGEST, "in_flight": 2 * STEP, "step": STEP, "most": MOST,
    }  # fmt: skip


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[Any, Any]:
    """Return what vLLM takes in of each model and length: some 40, of long ones 12."""
    folder = tmp_path_factory.mktemp("vllm")
    given, answered = folder / "cases.json", folder / "answers.json"
    asked = {}
    for key, (pages, case) in cases().items():
        for tokens in lengths(case):
            sequences = 40.5 if tokens <= SHORT else 12.5
            space = int(sequences * pages.blocks(tokens) * pages.block_bytes)
            asked[*key, tokens] = {**case, "tokens": tokens, "bytes": space}
    given.write_text(json.dumps(list(asked.values())), encoding="utf-8")
    forks.run(DRIVER.read_text(encoding="utf-8"), str(given), str(answered))
    answers = json.loads(answered.read_text(encoding="utf-8"))
    return {
        key: (case["bytes"], answer)
        for (key, case), answer in zip(asked.items(), answers, strict=True)
    }


@pytest.mark.parametrize("key", cases(), ids=str)
def test_as_many_sequences_as_in_vllm(key: tuple[str, int, int], counts: dict[Any, Any]) -> None:
    """The last one needs room for what its prompt's windows hold while it is computed."""
    pages, case = cases()[key]
    for tokens in lengths(case):
        space, theirs = counts[*key, tokens]
        usable = pages.usable_blocks(space)
        assert (usable + 1, pages.block_tokens) == (theirs["blocks"], theirs["block_tokens"])
        assert sum(group.number for group in pages.groups) == theirs["groups"]
        each = pages.blocks(tokens)
        more = pages.blocks(tokens, in_flight=2 * STEP) - each
        assert abs(int((usable - more) // each) - theirs["sequences"]) <= 1, tokens
