"""Exports: the same engines, GPUs and limits in the words of every stack."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.plan import KvOffload, Plan, to_json
from minicluster.specs.lora import LoraSpec
from minicluster.specs.slicing import Slicing
from sizing.stacks import FORMAT_NAMES
from sizing.stacks.formats import FORMATS, export
from sizing.stacks.read import read_deployed
from tests.sizing.conftest import Sizing
from tests.sizing.stacks.deployments import deepseek, plan_with


def split() -> Plan:
    """Return a plan of split pools."""
    return plan_with(prefill=(3, Slicing(tp=2)), decode=(2, Slicing(tp=4)))


def wide() -> Plan:
    """Return a plan whose replicas have 16 GPUs on two nodes."""
    return plan_with(mixed=(2, Slicing(tp=4, dp=4, ep=16)))


def only(plan: Plan, target: str) -> str:
    """Return the one file of a target."""
    (text,) = export(plan, target, image="vllm:x").values()
    return text


def document(plan: Plan, target: str) -> dict[str, Any]:
    """Return what a target's one YAML file says."""
    found: dict[str, Any] = yaml.safe_load(only(plan, target))
    return found


def test_help_names_all_formats() -> None:
    assert tuple(FORMATS) == FORMAT_NAMES


@pytest.mark.parametrize("target", FORMATS)
def test_the_first_line_says_how_far_a_file_is_checked(target: str) -> None:
    """Only what a test gives to the project's own parser is called checked."""
    for text in export(split(), target, image="vllm:x").values():
        first = text.splitlines()[0]
        assert re.match(r"# (Checked in a test with|not validated:) ", first)
        assert first.startswith("# Checked") == FORMATS[target].validated


SLICINGS = st.sampled_from(
    [Slicing(tp=1), Slicing(tp=8), Slicing(tp=2, dp=4, ep=8), Slicing(tp=4, pp=2),
     Slicing(tp=4, dp=4, ep=16), Slicing(tp=16), Slicing(tp=8, pp=4)]
)  # fmt: skip
SIZES = st.tuples(st.integers(1, 9), SLICINGS)
POOLS = st.one_of(
    st.fixed_dictionaries({"mixed": SIZES}),
    st.fixed_dictionaries({"prefill": SIZES, "decode": SIZES}),
)
LORA = LoraSpec(max_loras=2, max_lora_rank=32, max_cpu_loras=4, adapters=4)
OFFLOADS = [
    None,
    KvOffload(host_bytes=2e11, host_bytes_per_s={"h100-sxm": 5e10}),
    KvOffload(host_bytes=1e11, host_bytes_per_s={"h100-sxm": 5e10}, disk_bytes=1e12,
              disk_bytes_per_s=5e9, disk_path="/kv cache"),
]  # fmt: skip


ENGINES = st.fixed_dictionaries({
    "speculative_tokens": st.integers(0, 3), "chunked_prefill_tokens": st.sampled_from([0, 512]),
    "watermark_fraction": st.sampled_from([0.0, 0.01]),
    "lora": st.sampled_from([None, LORA]), "kv_offload": st.sampled_from(OFFLOADS),
    "two_batch_overlap": st.booleans(), "gpu_memory_utilization": st.sampled_from([0.8, 0.92]),
    "kv_dtype": st.sampled_from(["bf16", "fp8"]), "block_size": st.sampled_from([16, 64]),
    "max_model_len": st.sampled_from([8192, 131072]),
})  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(pools=POOLS, experts=st.booleans(), own=ENGINES)
def test_what_is_exported_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    pools: dict[str, tuple[int, Slicing]],
    experts: bool,  # noqa: FBT001
    own: dict[str, Any],
) -> None:
    """Every file of vLLM, Dynamo and Ray gives every pool and every setting of the engines."""
    plan = deepseek(**pools) if experts else plan_with(**pools)
    own["speculative_tokens"] *= experts
    own["two_batch_overlap"] &= "mixed" not in pools
    own["all_to_all"] = "deepep" if own["two_batch_overlap"] else None
    engine = replace(plan.engine, mean_accepted_tokens=0.0, **own)
    plan = replace(plan, engine=engine)
    file = tmp_path_factory.mktemp("exported") / "file"
    for target in READ if engine.kv_offload is None else ("vllm", "ray"):
        file.write_text(only(plan, target))
        found = read_deployed(file)
        assert found.pools == {role: f"{count}x{of}" for role, (count, of) in pools.items()}
        assert found.keys == settings_of(plan)


READ = ("vllm", "dynamo", "ray")
"""Formats whose files `sizing read` takes."""


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return the keys of a scenario for a plan's engines."""
    engine, pool, offload, lora = (
        plan.engine,
        plan.pools[0],
        plan.engine.kv_offload,
        plan.engine.lora,
    )
    routing = [each for each in plan.pools if each.slicing.routes_tokens and each.role != "mixed"]
    keys: dict[str, Any] = {
        "model.id": plan.model.source,
        "model.max_context_tokens": engine.max_model_len,
        "model.weight_dtype": "fp8" if pool.dtype == "fp8" else None,
        "model.kv_dtype": None if engine.kv_dtype == pool.dtype == "bf16" else engine.kv_dtype,
        "engine.name": "vllm",
        "engine.block_size": engine.block_size,
        "engine.max_num_seqs": pool.max_num_seqs,
        "engine.max_num_batched_tokens": pool.max_num_batched_tokens,
        "engine.gpu_memory_utilization": engine.gpu_memory_utilization,
        "engine.chunked_prefill_tokens": engine.chunked_prefill_tokens or None,
        "engine.watermark_fraction": engine.watermark_fraction or None,
        "engine.speculative_tokens": engine.speculative_tokens or None,
        "engine.all_to_all": engine.all_to_all if routing else None,
        "engine.two_batch_overlap": (engine.two_batch_overlap or None) if routing else None,
        "engine.kv_offload_host_bytes": offload and offload.host_bytes,
        "engine.kv_offload_disk_path": offload and offload.disk_path,
        "engine.lora_target_modules": lora and list(lora.target_modules),
    }
    for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
        keys[f"engine.{name}"] = getattr(lora, name, None)
    if plan.model.moe and any(each.ep > 1 for each in plan.pools):
        keys["engine.redundant_experts"] = plan.model.moe.redundant_experts
    return {key: value for key, value in keys.items() if value is not None}


def test_a_graph_of_dynamo_leaves_ranks_and_addresses_to_its_operator() -> None:
    """Nodes are a count; no shell expands a variable in the arguments of a pod."""
    ranks = re.compile(r"nnodes|node-rank|master-addr|data-parallel-(size-local|address)|\$")
    for slicing in (Slicing(tp=4, dp=4, ep=16), Slicing(tp=16), Slicing(tp=8, pp=2)):
        text = only(plan_with(mixed=(1, slicing)), "dynamo")
        assert "nodeCount: 2" in text
        assert not ranks.search(text)


@pytest.mark.parametrize("made", [split, wide])
def test_every_stack_gets_all_gpus(made: Callable[[], Plan]) -> None:
    """Replicas times nodes times GPUs of a node are the plan's, in each stack's words."""
    plan = made()
    expected = sorted(pool.gpus for pool in plan.pools)
    services = document(plan, "dynamo")["spec"]["services"].values()
    dynamo = [
        each["replicas"]
        * int(each["resources"]["limits"]["gpu"])
        * each.get("multinode", {}).get("nodeCount", 1)
        for each in services
        if each["componentType"] == "worker"
    ]
    assert sorted(dynamo) == expected
    values = document(plan, "llm-d")
    pools = [values[each] for each in ("prefill", "decode") if values[each]["create"]]
    gpus = "nvidia.com/gpu"
    llm_d = [
        each["replicas"]
        * each["parallelism"]["workers"]
        * int(each["containers"][0]["resources"]["limits"][gpus])
        for each in pools
    ]
    assert sorted(llm_d) == expected
    spec = document(plan, "kserve")["spec"]
    kserve = [
        each["replicas"] * each["parallelism"]["tensor"] * each["parallelism"].get("data", 1)
        for each in (spec, spec.get("prefill"))
        if each
    ]
    assert sorted(kserve) == expected


def test_a_replica_on_two_nodes_has_a_command_for_each() -> None:
    """The second node is headless and holds the ranks after the first node's."""
    text = only(wide(), "vllm")
    first, second = text.split("# node 1\n")
    assert "--data-parallel-size-local 2" in first
    assert "--headless" not in first
    assert "--data-parallel-start-rank 2" in second
    assert "--headless" in second
    assert text.count('--data-parallel-address "$HEAD"') == 2


def test_sglang_counts_what_ranks_share() -> None:
    """Its TP counts all GPUs of the experts, and its limits those of all ranks."""
    text = only(wide(), "sglang")
    pool = wide().pools[0]
    for flag in (
        "--tp-size 16",
        "--dp-size 4",
        "--enable-dp-attention",
        "--ep-size 16",
        f"--max-running-requests {4 * pool.max_num_seqs}",
        f"--chunked-prefill-size {4 * pool.max_num_batched_tokens}",
        "--nnodes 2",
    ):
        assert flag in text


def test_tensorrt_llm_has_whole_attention_in_a_rank() -> None:
    """Attention DP of sliced copies is refused; of whole ones its TP counts the GPUs."""
    with pytest.raises(InputError, match="TensorRT-LLM's attention DP"):
        export(wide(), "trtllm")
    files = export(plan_with(mixed=(1, Slicing(tp=1, dp=8, ep=8))), "trtllm")
    found = yaml.safe_load(files["mixed.yaml"])
    assert (found["tensor_parallel_size"], found["enable_attention_dp"]) == (8, True)
    assert found["moe_expert_parallel_size"] == 8


def test_the_routers_of_split_pools_know_every_engine() -> None:
    """SGLang's and TensorRT-LLM's routers get one address a replica."""
    text = only(split(), "sglang")
    assert (text.count("--prefill http"), text.count("--decode http")) == (3, 2)
    router = yaml.safe_load(export(split(), "trtllm")["disaggregated.yaml"])
    assert len(router["context_servers"]["urls"]) == router["context_servers"]["num_instances"] == 3


def test_the_command_writes_files_or_prints_them(sizing: Sizing, tmp_path: Path) -> None:
    """With a folder files are written; without, each is printed under its name."""
    plan = tmp_path / "plan.json"
    plan.write_text(to_json(split()))
    said = sizing("export", str(plan), "--to", "trtllm")
    assert said.code == 0
    assert said.out.count("# file: ") == 4
    said = sizing("export", str(plan), "--to", "vllm", "-o", str(tmp_path / "out"))
    assert (tmp_path / "out" / "vllm.sh").read_text().count("vllm serve ") == 2
