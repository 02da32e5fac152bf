from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tokenizers import Tokenizer

from minicluster.errors import InputError
from serving.measurement.demo_model import HASH_FILE, _bfloat16, make_demo_model
from tests.serving.conftest import SMALL


def _contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


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


def _tensor(raw: bytes, start: int, about: dict[str, Any]) -> NDArray[np.float32]:
    """Return a tensor of a safetensors file whose tensors begin at *start*."""
    first, last = (start + offset for offset in about["data_offsets"])
    bits = np.frombuffer(raw[first:last], np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(about["shape"])


def test_tensors_match_config(small_model: Path) -> None:
    """
    Every tensor of a Llama of this shape is there, and no other, all bfloat16.

    Only words can be put out: tokens that are readable text of their own, space first.
    """
    raw = (small_model / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert header["model.layers.0.self_attn.k_proj.weight"]["shape"] == [32, 64]
    layer = "model.layers.0.self_attn"
    spreads = [_tensor(raw, start, header[f"{layer}.{name}_proj.weight"]).std() for name in "qk"]
    assert spreads[0] == pytest.approx(2 * spreads[1], rel=0.1)  # attention does not average
    head = header["lm_head.weight"]
    assert head["shape"] == [SMALL.vocab_size, 64]
    assert len(header) == 3 + 9 * SMALL.num_layers

    [words] = _tensor(raw, start, head).any(axis=1).nonzero()
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    texts = [tokenizer.decode([word]) for word in words]
    assert len(texts) == 2000
    assert all(text[0] == " " and text[1:].isalpha() and text.isascii() for text in texts)


@given(st.text())
def test_any_text_survives_the_tokenizer(small_model: Path, text: str) -> None:
    """Decoding what was encoded gives the text back."""
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = any(token in text for token in ("<|begin|>", "<|end|>", "<|user|>"))
    assert special or tokenizer.decode(ids) == text


@given(arrays(np.float32, 8, elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_bfloat16_rounds_to_nearest(values: np.ndarray) -> None:
    """Rounding to bfloat16 errs by at most half a unit in the eighth binary digit."""
    back = (_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    normal = np.abs(values) > 1e-30
    assert np.all(np.abs(back - values)[normal] <= np.abs(values)[normal] * 2**-8)


def test_bfloat16_rounds_ties_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    assert _bfloat16(ties).tolist() == [0x3F80, 0x3F82]
