"""Exports are what the projects' own parsers and schemas take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from minicluster.specs.slicing import Slicing
from sizing.stacks.export import export
from tests.sizing.stacks.deployments import deepseek, plan_with

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from minicluster.plan import Plan
    from tests.serving.forks import Forks

pytestmark = pytest.mark.engine

GROUP, WIDE = Slicing(tp=2, dp=4, ep=8), Slicing(tp=4, dp=4, ep=16)

PLANS: dict[str, Callable[[], Plan]] = {
    "split": lambda: plan_with(prefill=(3, Slicing(tp=2)), decode=(2, Slicing(tp=4))),
    "mixed": lambda: plan_with(mixed=(2, Slicing(tp=1))),
    "stages on two nodes": lambda: plan_with(mixed=(1, Slicing(tp=8, pp=2))),
    "experts": lambda: deepseek(prefill=(2, GROUP), decode=(1, WIDE)),
}

VLLM = """
import shlex, sys
from pathlib import Path
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for line in Path(sys.argv[1]).read_text().replace("\\\\\\n", " ").splitlines():
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
document = yaml.safe_load(Path(sys.argv[1]).read_text())
(application,) = ServeDeploySchema.parse_obj(document).applications
schema = PDServingArgs if "_pd_" in application.import_path else LLMServingArgs
args = schema.model_validate(application.args)
split = schema is PDServingArgs
for config in [args.prefill_config, args.decode_config] if split else args.llm_configs:
    print(config.get_engine_config().engine_kwargs["tensor_parallel_size"])
"""


@pytest.mark.parametrize("name", PLANS)
def test_vllm_takes_every_command(forks: Forks, tmp_path: Path, name: str) -> None:
    """Its argument parser knows every flag and value, also of the nodes of one replica."""
    plan = PLANS[name]()
    file = tmp_path / "vllm.sh"
    file.write_text(export(plan, "vllm")["vllm.sh"])
    said = forks.run(VLLM, str(file))
    nodes = [max(1, pool.slicing.gpus // 8) for pool in plan.pools]
    expected = [
        f"{pool.tp} {pool.dp} {pool.max_num_seqs}"
        for pool, count in zip(plan.pools, nodes, strict=True)
        for _ in range(count)
    ]
    assert said == expected


@pytest.mark.parametrize("name", PLANS)
def test_ray_serve_takes_the_file(forks: Forks, tmp_path: Path, name: str) -> None:
    """Ray Serve's schema and those of its LLM applications accept it, engine arguments included."""
    plan = PLANS[name]()
    file = tmp_path / "serve.yaml"
    file.write_text(export(plan, "ray")["ray-serve-llm.yaml"])
    assert forks.run(RAY, str(file)) == [str(pool.tp) for pool in plan.pools]
