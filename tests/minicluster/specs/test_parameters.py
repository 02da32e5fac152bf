"""Parameter counts against published totals, and their closed forms."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.specs.model import ModelSpec, MoeSpec
from minicluster.specs.parameters import num_active_parameters, num_parameters, parameters
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.memory import weight_bytes

PUBLISHED = tomllib.loads(
    (Path(__file__).parents[2] / "published" / "parameter_counts.toml").read_text(encoding="utf-8")
)

TINY = ModelSpec(
    id="tiny",
    source="tiny",
    config_hash="0" * 16,
    num_layers=1,
    hidden_size=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    ffn_size=8,
    vocab_size=10,
    max_context_tokens=16,
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_agree_with_the_published_ones(name: str) -> None:
    model, row = catalog.find_model(name), PUBLISHED[name]
    tolerance = row["tolerance_fraction"]
    assert num_parameters(model) == pytest.approx(row["parameters"], rel=tolerance, abs=0)
    if "active" in row:
        assert num_active_parameters(model) == pytest.approx(row["active"], rel=tolerance)


def test_every_model_of_the_catalog_has_a_published_total() -> None:
    assert set(PUBLISHED) == set(catalog.models())


def test_tiny_model_by_hand() -> None:
    """One layer: tables 2 x 40, attention 16 + 16 + 16, feed-forward 3 x 32, norms 3 x 4."""
    p = parameters(TINY)
    assert (p.embedding, p.lm_head, p.attention, p.dense_ffn, p.norms) == (40, 40, 48, 96, 12)
    assert num_parameters(TINY) == 236
    assert num_active_parameters(TINY) == 196


@given(layers=st.integers(1, 50))
def test_layers_add_up(layers: int) -> None:
    """Every layer holds the same number of parameters."""
    one, two, many = (num_parameters(replace(TINY, num_layers=n)) for n in (1, 2, 2 + layers))
    assert many == two + layers * (two - one)


@given(experts=st.integers(2, 64), visited=st.integers(1, 64))
def test_active_is_total_when_every_expert_is_visited(experts: int, visited: int) -> None:
    visited = min(visited, experts)
    moe = MoeSpec(num_experts=experts, experts_per_token=visited, expert_ffn_size=8)
    model = replace(TINY, ffn_size=0, moe=moe)
    everything = num_parameters(model) - parameters(model).embedding
    missing = (experts - visited) * 3 * 4 * 8
    assert num_active_parameters(model) == everything - missing


def test_tied_tables_are_counted_once_but_multiplied() -> None:
    """A tied head costs no memory and as much work."""
    tied = replace(TINY, tied_embeddings=True)
    assert num_parameters(TINY) - num_parameters(tied) == parameters(TINY).lm_head
    assert num_active_parameters(tied) == num_active_parameters(TINY)


def test_quantised_weights_leave_tables_alone() -> None:
    """Tables, norms and routers stay in the model's dtype; attention where the model says so."""
    p = parameters(TINY)
    fp8 = replace(TINY, weight_dtype="fp8")
    kept = 2 * (p.embedding + p.lm_head + p.norms)
    assert weight_bytes(TINY, slicing=Slicing()) == 2 * p.total
    assert weight_bytes(fp8, slicing=Slicing()) == p.attention + p.dense_ffn + kept
    apart = replace(fp8, attention_quantised=False)
    assert weight_bytes(apart, slicing=Slicing()) == 2 * p.attention + p.dense_ffn + kept


def test_fp8_checkpoint_weighs_what_vllm_measured() -> None:
    """Llama-3.3-70B in fp8 takes 33.88 GiB on each of two GPUs (llm-d-planner, vLLM on H100)."""
    model = replace(catalog.find_model("llama-3.3-70b"), weight_dtype="fp8")
    assert weight_bytes(model, slicing=Slicing()) / 2 / 2**30 == pytest.approx(33.88, rel=0.002)
