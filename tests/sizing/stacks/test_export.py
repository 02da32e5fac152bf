"""Exports: the same engines, GPUs and limits in the words of every stack."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.plan import Plan, to_json
from minicluster.specs.slicing import Slicing
from sizing.stacks.export import export
from sizing.stacks.read import read_deployment_file
from sizing.stacks.targets import TARGETS
from tests.sizing.conftest import Sizing
from tests.sizing.stacks.deployments import plan_with


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


@pytest.mark.parametrize("target", TARGETS)
def test_the_first_line_says_how_far_a_file_is_checked(target: str) -> None:
    """Only what a test gives to the project's own parser is called checked."""
    for text in export(split(), target, image="vllm:x").values():
        first = text.splitlines()[0]
        assert re.match(r"# (Checked in a test with|not validated:) ", first)
        assert first.startswith("# Checked") == (target in {"vllm", "ray"})


SIZES = st.tuples(
    st.integers(1, 9),
    st.sampled_from([Slicing(tp=1), Slicing(tp=8), Slicing(tp=2, dp=4, ep=8), Slicing(tp=4, pp=2),
                     Slicing(tp=4, dp=4, ep=16), Slicing(tp=16)]),
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(prefill=SIZES, decode=SIZES)
def test_what_is_exported_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    prefill: tuple[int, Slicing],
    decode: tuple[int, Slicing],
) -> None:
    """Scripts of vLLM and graphs of Dynamo give the pools and limits that the plan has."""
    plan = plan_with(prefill=prefill, decode=decode)
    file = tmp_path_factory.mktemp("exported") / "file"
    for target in ("vllm", "dynamo"):
        file.write_text(only(plan, target))
        asked, found = read_deployment_file(file, base="llama-3.1-8b-h100")
        assert found.pools == {
            "prefill": f"{prefill[0]}x{prefill[1]}",
            "decode": f"{decode[0]}x{decode[1]}",
        }
        engine = asked.scenario.engine
        pool = plan.pools[0]
        assert (engine.max_num_seqs, engine.block_size) == (
            pool.max_num_seqs,
            plan.engine.block_size,
        )
        assert asked.model.max_context_tokens == plan.engine.max_model_len
        assert found.notes == ()


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
