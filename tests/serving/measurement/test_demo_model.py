from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minicluster.errors import InputError
from serving.measurement.demo_model import HASH_FILE, make_demo_model
from tests.serving.conftest import SMALL


def _contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def _tensors(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file  # noqa: PLC0415  (imports torch)

    return load_file(model / "model.safetensors")


def test_a_model_is_written_only_where_it_is_not_there(tmp_path: Path) -> None:
    """The same seed gives the same bytes; an intact model is left alone, a damaged one is not."""
    directory = make_demo_model(tmp_path / "a", SMALL)
    whole, weights = _contents(directory), directory / "model.safetensors"
    assert _contents(make_demo_model(tmp_path / "b", SMALL)) == whole
    before = weights.stat().st_mtime_ns
    make_demo_model(directory, SMALL)
    assert weights.stat().st_mtime_ns == before
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    make_demo_model(directory, SMALL)
    assert _contents(directory) == whole


def test_model_of_another_dtype_is_made_again(tmp_path: Path) -> None:
    """The dtype changes what config.json asks for, and the weights stay the same bytes."""
    first = _contents(make_demo_model(tmp_path / "a", SMALL))
    second = _contents(make_demo_model(tmp_path / "a", SMALL, "fp32"))
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"config.json", HASH_FILE}
    named = [json.loads(each["config.json"])["torch_dtype"] for each in (first, second)]
    assert named == ["bfloat16", "float32"]
    assert _contents(make_demo_model(tmp_path / "b", SMALL, "fp32")) == second
    with pytest.raises(InputError, match="bf16 or fp32"):
        make_demo_model(tmp_path / "c", SMALL, "int8")
    assert not (tmp_path / "c").exists()


def test_other_directory_is_not_overwritten(tmp_path: Path) -> None:
    """A directory that holds something else is refused and left as it is."""
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="earlier demo model"):
        make_demo_model(tmp_path, SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_tensors_match_config(small_model: Path, torch: ModuleType) -> None:
    """
    Every tensor of a Llama of this shape is there, and no other, all bfloat16.

    Only words can be put out: tokens that are readable text of their own, space first.
    """
    tensors = _tensors(small_model)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    layer = "model.layers.0.self_attn"
    query, key = (tensors[f"{layer}.{name}_proj.weight"] for name in "qk")
    assert key.shape == (32, 64)
    assert float(query.std()) == pytest.approx(2 * float(key.std()), rel=0.1)  # no average
    head = tensors["lm_head.weight"]
    assert head.shape == (SMALL.vocab_size, 64)
    assert len(tensors) == 3 + 9 * SMALL.num_layers

    words = head.any(dim=1).nonzero().flatten().tolist()
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    texts = [tokenizer.decode([word]) for word in words]
    assert len(texts) == 2000
    assert all(text[0] == " " and text[1:].isalpha() and text.isascii() for text in texts)


def test_weights_are_rounded_as_torch_does(small_model: Path, torch: ModuleType) -> None:
    """To the nearest, of a tie to the even one."""
    shape = (SMALL.vocab_size, SMALL.hidden_size)
    drawn = np.random.default_rng(SMALL.seed).standard_normal(shape, dtype=np.float32)
    written = _tensors(small_model)["model.embed_tokens.weight"]
    assert torch.equal(written, torch.from_numpy(drawn).to(torch.bfloat16))


@given(st.text())
def test_any_text_survives_the_tokenizer(small_model: Path, text: str) -> None:
    """Decoding what was encoded gives the text back."""
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = any(token in text for token in ("<|begin|>", "<|end|>", "<|user|>"))
    assert special or tokenizer.decode(ids) == text
