"""Exports are what the projects' own parsers and schemas take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from minicluster.plan import KvOffload, Plan
from minicluster.specs.lora import LoraSpec
from minicluster.specs.slicing import Slicing
from sizing.stacks.formats import export
from tests.serving.forks import Forks
from tests.sizing.stacks.deployments import deepseek, plan_with

GROUP, WIDE = Slicing(tp=2, dp=4, ep=8), Slicing(tp=4, dp=4, ep=16)


def offloading(plan: Plan) -> Plan:
    """Return the plan with host memory and a disk for KV blocks."""
    offload = KvOffload(
        host_bytes=1e11, host_bytes_per_s={plan.pools[0].gpu: 5e10}, disk_bytes=1e12,
        disk_bytes_per_s=5e9, disk_path="/kv",
    )  # fmt: skip
    return replace(plan, engine=replace(plan.engine, kv_offload=offload))


def overlapping(plan: Plan) -> Plan:
    """Return the plan with tokens sent by DeepEP in two halves."""
    engine = replace(plan.engine, all_to_all="deepep", two_batch_overlap=True)
    return replace(plan, engine=engine)


def with_adapters(plan: Plan) -> Plan:
    """Return the plan with slots for adapters."""
    lora = LoraSpec(max_loras=2, max_lora_rank=16, max_cpu_loras=4, adapters=4)
    return replace(plan, engine=replace(plan.engine, lora=lora))


PLANS: dict[str, Callable[[], Plan]] = {
    "split": lambda: plan_with(prefill=(3, Slicing(tp=2)), decode=(2, Slicing(tp=4))),
    "mixed": lambda: plan_with(mixed=(2, Slicing(tp=1))),
    "offloading": lambda: offloading(plan_with(mixed=(2, Slicing(tp=2)))),
    "offloading in split pools": lambda: offloading(
        plan_with(prefill=(1, Slicing(tp=2)), decode=(1, Slicing(tp=2)))
    ),
    "adapters": lambda: with_adapters(plan_with(mixed=(2, Slicing(tp=2)))),
    "stages on two nodes": lambda: plan_with(mixed=(1, Slicing(tp=8, pp=2))),
    "experts": lambda: deepseek(prefill=(2, GROUP), decode=(1, WIDE)),
    "two halves": lambda: overlapping(deepseek(prefill=(2, GROUP), decode=(1, WIDE))),
}

VLLM = """
import shlex, sys
from pathlib import Path
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for file in sys.argv[1:]:
    for line in Path(file).read_text().replace("\\\\\\n", " ").splitlines():
        if line.startswith("vllm serve "):
            found = parser.parse_args(shlex.split(line.removeprefix("vllm serve ")))
            print(found.tensor_parallel_size, found.data_parallel_size, found.max_num_seqs)
"""

RAY = """
import sys
from pathlib import Path
import yaml
from ray.serve.schema import ServeDeploySchema
from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
from ray.serve.llm import LLMServingArgs
for file in sys.argv[1:]:
    document = yaml.safe_load(Path(file).read_text())
    (application,) = ServeDeploySchema.parse_obj(document).applications
    split = "_pd_" in application.import_path
    args = (PDServingArgs if split else LLMServingArgs).model_validate(application.args)
    for config in [args.prefill_config, args.decode_config] if split else args.llm_configs:
        print(config.get_engine_config().engine_kwargs["tensor_parallel_size"])
"""


def exported(plans: list[Plan], target: str, folder: Path) -> list[str]:
    """Write the one file of each plan; return where."""
    files = []
    for number, plan in enumerate(plans):
        (text,) = export(plan, target).values()
        file = folder / f"{target}-{number}"
        file.write_text(text)
        files.append(str(file))
    return files


def test_the_projects_take_their_files(forks: Forks, tmp_path: Path) -> None:
    """
    The parser of vLLM knows every flag and value, also of the nodes of one replica.

    Ray Serve's schema and those of its LLM applications accept theirs, engine arguments included.
    """
    plans = [made() for made in PLANS.values()]
    pools = [pool for plan in plans for pool in plan.pools]
    nodes = [max(1, pool.slicing.gpus // 8) for pool in pools]
    expected = [
        f"{pool.tp} {pool.dp} {pool.max_num_seqs}"
        for pool, count in zip(pools, nodes, strict=True)
        for _ in range(count)
    ]
    assert forks.run(VLLM, *exported(plans, "vllm", tmp_path)) == expected
    assert forks.run(RAY, *exported(plans, "ray", tmp_path)) == [str(pool.tp) for pool in pools]
