"""The demo model: a Llama or Mixtral of random weights with a tokenizer, without downloads."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import TensorSpec, serialize_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minicluster.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HASH_FILE = "sha256.json"
"""File with the hashes of `FILES`; only a directory that holds one is ever replaced."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""The dtypes of the demo model, and their names in `config.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoShape:
    """
    Shape of the demo model: as large as leaves the cores time for everything around the engines.

    Attributes:
        query_gain: spread of the attention scores; at 1 attention averages, and long contexts
            give equal outputs.
        logit_std: spread of the logits; large, so that rounding seldom changes the best token.
        num_experts: experts of a feed-forward, two for a token (Mixtral); 0: dense (Llama).
        seed: seed of the weights; equal shapes give equal bytes.
    """

    num_layers: int = 3
    hidden_size: int = 512
    ffn_size: int = 2048
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab_size: int = 4480
    max_context_tokens: int = 2048
    query_gain: float = 2.0
    logit_std: float = 4.0
    num_experts: int = 0
    seed: int = 20261120


MOE_SHAPE = DemoShape(num_layers=3, hidden_size=256, ffn_size=256, num_experts=8)
"""A small model with experts, to try layouts of them on a CPU; steps are not mostly compute."""

FP32_SHAPE = DemoShape(num_layers=2)
"""For CPUs that compute in fp32: a layer takes them twice as long and more, the demo does not."""


def make_demo_model(directory: Path, shape: DemoShape | None = None, dtype: str = "bf16") -> Path:
    """
    Write the demo model, unless the same one exists already; return its absolute directory.

    *dtype*, a key of `DTYPES`, is what engines compute in; the weights are stored as bf16, which
    float32 represents exactly.

    Raises:
        InputError: the directory holds other files, or there is no such dtype.
    """
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, " or ".join(DTYPES))
    directory = directory.absolute()
    shape = shape or DemoShape()
    if directory.exists() and any(directory.iterdir()):
        if not (directory / HASH_FILE).exists():
            raise InputError(
                str(directory), "another directory", "an empty place or an earlier demo model"
            )
        if (directory / HASH_FILE).read_bytes() == _record(directory, shape, dtype):
            return directory
    # Written beside it and renamed, so that an interrupt leaves no partial model.
    draft = directory.with_name(directory.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    _write(draft, shape, dtype)
    shutil.rmtree(directory, ignore_errors=True)
    draft.rename(directory)
    return directory


def _write(directory: Path, shape: DemoShape, dtype: str) -> None:
    vocabulary, merges, words = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_bytes(_json(_tokenizer_config(shape)))
    (directory / "config.json").write_bytes(_json(model_config(shape, dtype)))
    _write_weights(directory / "model.safetensors", shape, words)
    (directory / HASH_FILE).write_bytes(_record(directory, shape, dtype))


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]], list[int]]:
    """
    Build a byte-level BPE from syllables.

    Every byte is a token, so any text can be encoded; two-syllable words with their space are one
    token each, and only these are generated, so that each token is readable text by itself.

    Returns:
        Token ids, merges in order, and the ids of the words.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet]
    syllables = [(c, v) for c in "bcdfghjklmnpqrstvwxz" for v in "aeiou"]
    pairs = [
        ("".join(first), "".join(second))
        for i, first in enumerate(syllables)
        for j, second in enumerate(syllables)
        if (i * 3 + j) % 5 == 0
    ]
    spaced = [("Ġ", "".join(pair)) for pair in pairs]
    merges = [*syllables, *pairs, *spaced]
    tokens += ["".join(merge) for merge in merges]
    ids = {token: i for i, token in enumerate(tokens)}
    return ids, merges, [ids["".join(merge)] for merge in spaced]


def model_config(shape: DemoShape, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of a model, from which alone it can be planned for."""
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": 2,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": DTYPES[dtype],
        **(experts if shape.num_experts else {}),
    }


def _tokenizer_config(shape: DemoShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "model_max_length": shape.max_context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_weights(path: Path, shape: DemoShape, words: list[int]) -> None:
    """
    Draw the weights and write them as bfloat16.

    Each matrix keeps the variance of its input (std 1 / sqrt(fan in)), so every layer contributes
    as much as the embedding: the next token then depends on the whole context, and greedy output
    does not loop, as it does with the usual small initial weights. Rows of lm_head are zero except
    for words, so that no other token is generated, end-of-text included.
    """
    rng = np.random.default_rng(shape.seed)
    hidden = shape.hidden_size
    kv = hidden // shape.num_heads * shape.num_kv_heads
    tensors: dict[str, NDArray[np.uint16]] = {}

    def draw(name: str, rows: int, columns: int, std: float) -> None:
        tensors[name] = _bfloat16(
            rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)
        )

    draw("model.embed_tokens.weight", shape.vocab_size, hidden, 1.0)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name, rows, columns, gain in (
            ("self_attn.q_proj", hidden, hidden, shape.query_gain),
            ("self_attn.k_proj", kv, hidden, 1.0),
            ("self_attn.v_proj", kv, hidden, 1.0),
            ("self_attn.o_proj", hidden, hidden, 1.0),
            *_feed_forward(shape),
        ):
            draw(f"{prefix}.{name}.weight", rows, columns, gain * columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = _bfloat16(np.ones(hidden, dtype=np.float32))
    tensors["model.norm.weight"] = _bfloat16(np.ones(hidden, dtype=np.float32))
    draw("lm_head.weight", shape.vocab_size, hidden, shape.logit_std * hidden**-0.5)
    not_words = np.ones(shape.vocab_size, dtype=bool)
    not_words[words] = False
    tensors["lm_head.weight"][not_words] = 0
    serialize_file(
        {
            name: TensorSpec(
                dtype="bfloat16",
                shape=list(tensor.shape),
                data_ptr=tensor.ctypes.data,
                data_len=tensor.nbytes,
            )
            for name, tensor in tensors.items()
        },
        str(path),
        metadata={"format": "pt"},
    )


def _feed_forward(shape: DemoShape) -> list[tuple[str, int, int, float]]:
    hidden, ffn = shape.hidden_size, shape.ffn_size
    if not shape.num_experts:
        return [
            ("mlp.gate_proj", ffn, hidden, 1.0),
            ("mlp.up_proj", ffn, hidden, 1.0),
            ("mlp.down_proj", hidden, ffn, 1.0),
        ]
    experts = [f"block_sparse_moe.experts.{number}" for number in range(shape.num_experts)]
    return [
        ("block_sparse_moe.gate", shape.num_experts, hidden, 1.0),
        *((f"{expert}.{name}", ffn, hidden, 1.0) for expert in experts for name in ("w1", "w3")),
        *((f"{expert}.w2", hidden, ffn, 1.0) for expert in experts),
    ]


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, nearest even; numpy has no such dtype, so its bits are returned."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _record(directory: Path, shape: DemoShape, dtype: str) -> bytes:
    present = [directory / name for name in FILES if (directory / name).exists()]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in present}
    return _json({"shape": asdict(shape), "dtype": dtype, "files": hashes})


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
