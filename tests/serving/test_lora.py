"""Adapters of one model behind one endpoint: split pools of vLLM on two cores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest

from minicluster.specs.lora import LoraSpec

from .adapters import RANK, make_adapter
from .client import send
from .command import serving
from .deployed import Shared, up
from .plans import make_deployment, make_plan

pytestmark = pytest.mark.engine


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
