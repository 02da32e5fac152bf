"""Parameter counts against published totals; catalog/test_huggingface.py counts each family's."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from minicluster.specs.parameters import num_active_parameters, parameters
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.memory import weight_bytes

PUBLISHED = tomllib.loads(
    (Path(__file__).parents[2] / "published" / "parameter_counts.toml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", catalog.models())
def test_totals_agree_with_the_published_ones(name: str) -> None:
    model, row = catalog.find_model(name), PUBLISHED[name]
    tolerance = row["tolerance_fraction"]
    assert parameters(model).total == pytest.approx(row["parameters"], rel=tolerance, abs=0)
    if "active" in row:
        assert num_active_parameters(model) == pytest.approx(row["active"], rel=tolerance)


def test_quantised_weights_leave_tables_alone() -> None:
    """Tables, norms and routers stay in the model's dtype; attention where the model says so."""
    model, whole = catalog.find_model("llama-3.1-8b"), Slicing()
    p, fp8 = parameters(model), replace(model, weight_dtype="fp8")
    kept = 2 * (p.embedding + p.lm_head + p.norms)
    assert weight_bytes(model, slicing=whole) == 2 * p.total
    assert weight_bytes(fp8, slicing=whole) == p.attention + p.dense_ffn + kept
    apart = replace(fp8, attention_quantised=False)
    assert weight_bytes(apart, slicing=whole) == 2 * p.attention + p.dense_ffn + kept
