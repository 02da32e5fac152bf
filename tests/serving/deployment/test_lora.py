"""LoRA adapters deployed: vLLM's arguments, facts, names at the endpoint, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from minicluster.engine_model.limits import LoraLimits
from minicluster.plan import Deployment, Plan, plan_from, to_json
from minicluster.specs.lora import ATTENTION_MODULES, MODULES, LoraSpec, adapter_bytes
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget, engine_kwargs, planned_facts
from serving.deployment.feasibility import findings, lora_findings
from serving.deployment.manifest import manifest_findings
from serving.deployment.target import Target
from serving.protocol.messages import RequestRefused
from serving.request.validation import check
from tests.serving.adapters import RANK, make_adapter
from tests.serving.forks import Forks
from tests.serving.plans import make_deployment, make_plan

LORA = LoraSpec(max_loras=2, max_lora_rank=RANK, max_cpu_loras=3, adapters=3)
NAMED = {"red": "/red", "blue": "/blue"}


@pytest.fixture(scope="session")
def adapting(deployment: Deployment) -> Deployment:
    """Return the deployment with two slots, and host memory for three adapters."""
    return replace(deployment, engine=replace(deployment.engine, lora=LORA))


def test_both_pools_get_slots_and_adapters(adapting: Deployment) -> None:
    """As vLLM names them; the facts that `serving verify` compares say the same."""
    target = DeployTarget(kind="cpu", lora_modules=NAMED)
    for pool in adapting.pools:
        kwargs = engine_kwargs(adapting, pool, target)
        assert kwargs["enable_lora"] is True
        found = {name: kwargs[name] for name in ("max_loras", "max_lora_rank", "max_cpu_loras")}
        assert found == {"max_loras": 2, "max_lora_rank": RANK, "max_cpu_loras": 3}
        assert [each["name"] for each in kwargs["lora_modules"]] == ["red", "blue"]
        facts = planned_facts(adapting, pool)["lora"]
        assert facts == found | {"target_modules": kwargs["lora_target_modules"]}
    served = compile_app(adapting, target, plan=make_plan(adapting))
    assert served.endpoint.models == ("demo", "red", "blue")


def test_simulated_engines_get_slots_and_names(adapting: Deployment) -> None:
    """The copy of an adapter takes as long as in the simulation, in the plan's seconds."""
    rated = replace(LORA, host_bytes_per_s={"cpu": 1e9})
    adapting = replace(adapting, engine=replace(adapting.engine, lora=rated))
    target = DeployTarget(kind="simulated", slowdown=4.0, lora_modules={"red": "", "blue": ""})
    served = compile_app(adapting, target, plan=make_plan(adapting))
    assert served.endpoint.models == ("demo", "red", "blue")
    for pool, planned in zip(served.pools, adapting.pools, strict=True):
        size = adapter_bytes(rated, adapting.model, tp=planned.tp, layers=adapting.model.num_layers)
        assert pool.simulated is not None
        assert pool.simulated.adapters == ("red", "blue")
        assert pool.simulated.lora == LoraLimits(slots=2, load_s=size / 1e9)


def test_without_slots_nothing_is_said(deployment: Deployment, plan: Plan) -> None:
    """Neither to vLLM nor in the plan's file."""
    target = DeployTarget(kind="cpu")
    assert not any("lora" in name for name in engine_kwargs(deployment, plan.pools[0], target))
    assert planned_facts(deployment, deployment.pools[0])["lora"] is None
    assert "lora" not in to_json(plan)


def test_a_plan_with_adapters_is_read_back(adapting: Deployment) -> None:
    """The file says them once, where other programs look for the engine's settings."""
    plan = make_plan(adapting)
    raw = json.loads(to_json(plan))
    assert raw["engine"]["lora"]["max_loras"] == 2
    assert "lora" not in raw["inputs"]["engine"]
    assert plan_from(raw, place="x") == plan


def test_a_request_names_an_adapter(adapting: Deployment) -> None:
    """Its name is passed on; without one the model is meant, and others are unknown."""
    models = ("demo", "red", "blue")
    for body, name in (({"model": "blue"}, "blue"), ({}, "demo")):
        given = {"prompt": "x", **body}
        assert check("completions", given, models=models, max_model_len=100)["model"] == name
    for name in ("green", None, ["red"]):
        with pytest.raises(RequestRefused) as refused:
            check("completions", {"model": name, "prompt": "x"}, models=models, max_model_len=100)
        assert (refused.value.refusal.status, refused.value.refusal.code) == (
            404,
            "model_not_found",
        )
        assert adapting.model.id in refused.value.refusal.message


def test_what_cannot_be_served_is_named(
    adapting: Deployment, deployment: Deployment, small_model: Path, tmp_path: Path
) -> None:
    """Adapters without slots, slots without adapters, too many, too large, and no adapters."""
    fits = str(make_adapter(tmp_path / "fits", small_model, seed=0))
    large = str(make_adapter(tmp_path / "large", small_model, seed=0, rank=16))
    assert not [*lora_findings(adapting, {"a": fits}, "cpu")]
    assert not [*lora_findings(deployment, {}, "simulated")]
    assert not [*lora_findings(adapting, {"a": "", "b": "/nowhere"}, "simulated")]
    for modules, kind, said in (
        ({}, "cpu", "NAME=PATH of each"),
        ({"demo": fits}, "cpu", "another name than the model's"),
        ({"a": large}, "cpu", "rank 16; expected 1 to engine.max_lora_rank, 8"),
        ({"a": "/nowhere"}, "cpu", "expected a PEFT adapter"),
        (dict.fromkeys("abcd", fits), "cpu", "at most engine.max_cpu_loras, 3"),
        ({}, "simulated", "NAME of each"),
        ({"demo": ""}, "simulated", "another name than the model's"),
        (dict.fromkeys("abcd", ""), "simulated", "at most engine.max_cpu_loras, 3"),
    ):
        assert said in "\n".join(lora_findings(adapting, modules, kind)), said
    assert "has no slots" in "\n".join(lora_findings(deployment, {"a": fits}, "cpu"))
    assert "names no adapters" in "\n".join(manifest_findings(adapting))
    assert not [*manifest_findings(deployment)]


def test_slots_count_in_the_memory_of_a_machine(adapting: Deployment, target: Target) -> None:
    """A machine with too little for them is refused."""
    wide = replace(LORA, max_loras=1000, max_cpu_loras=100_000, max_lora_rank=512)
    found = replace(adapting, engine=replace(adapting.engine, lora=wide))
    assert not findings(adapting, target)
    assert any("memory: about" in each for each in findings(found, target))


BUFFERS = """
import os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
slots, rank, *modules = sys.argv[2:]
engine = LLM(
    sys.argv[1], enable_lora=True, max_loras=int(slots), max_lora_rank=int(rank),
    lora_target_modules=modules, enforce_eager=True, max_model_len=256,
    kv_cache_memory_bytes=1 << 26, dtype="bfloat16",
).llm_engine
worker = engine.model_executor.driver_worker
runner = getattr(worker, "worker", worker).model_runner
layers = runner.lora_manager._adapter_manager.modules.values()
slots = [each for layer in layers for each in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
print("bytes", sum(each.numel() * each.element_size() for each in slots))
"""


@pytest.mark.parametrize("modules", [MODULES, ATTENTION_MODULES])
def test_slots_are_as_large_as_those_of_vllm(
    small_model: Path, forks: Forks, modules: tuple[str, ...]
) -> None:
    """Bytes follow from all modules, or from those of attention; tables have none."""
    lora = LoraSpec(
        max_loras=3, max_lora_rank=8, max_cpu_loras=3, adapters=3, target_modules=modules
    )
    model = make_deployment(small_model).model
    planned = lora.max_loras * adapter_bytes(lora, model, tp=1, layers=model.num_layers)
    assert f"bytes {planned:.0f}" in forks.run(BUFFERS, str(small_model), "3", "8", *modules)
