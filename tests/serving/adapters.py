"""LoRA adapters of random weights, as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8


def make_adapter(folder: Path, model: Path, *, seed: int, rank: int = RANK) -> Path:
    """Write an adapter of all linear layers of a demo model, so large that answers change."""
    config = json.loads((model / "config.json").read_text())
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, ffn),
        "mlp.up_proj": (hidden, ffn),
        "mlp.down_proj": (ffn, hidden),
    }
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inner, columns) in sizes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            a, b = rng.standard_normal((rank, inner)), rng.standard_normal((columns, rank))
            tensors[f"{at}.lora_A.weight"] = (a / inner**0.5).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (b / rank**0.5).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
        "bias": "none", "target_modules": [name.partition(".")[2] for name in sizes],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
