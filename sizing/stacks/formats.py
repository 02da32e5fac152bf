"""`sizing export`: the formats of other serving stacks that a plan is written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minicluster.errors import InputError
from minicluster.plan import Plan
from minicluster.specs.checks import one_of
from sizing.stacks import dynamo, kubernetes, ray, sglang, trtllm, vllm
from sizing.stacks.engines import Pools, Texts, engines_of

NAME_ADAPTERS = (
    "# LoRA: name the adapters, NAME=PATH of --lora-modules (vLLM) or --lora-paths (SGLang).\n"
)
"""Comment of files for a plan with slots for adapters, which says none of their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """
    Files of one serving stack.

    Attributes:
        engine: engine that the files start: `vllm`, `sglang` or `trtllm`.
        validated: whether the tool's own parser or schema takes the files in a test.
        remark: name of that parser, or the reason why there is none.
        write: texts of a plan's files, of its engines by role and a container image.
        needs_image: whether the files name a container image.
        offloads: whether the files name vLLM's connectors to host memory.
        left_out: settings of engines for which the files have no word.
    """

    engine: str
    validated: bool
    remark: str
    write: Callable[[Plan, Pools, str], Texts]
    needs_image: bool = False
    offloads: bool = True
    left_out: tuple[str, ...] = ()


FORMATS = {
    "vllm": ExportFormat(
        engine="vllm", validated=True, remark="the argument parser of vLLM 0.29.0",
        write=vllm.write_vllm,
    ),
    "sglang": ExportFormat(
        engine="sglang", validated=False, offloads=False, write=sglang.write_sglang,
        remark="SGLang's argument parser does not install beside vLLM",
    ),
    "trtllm": ExportFormat(
        engine="trtllm", validated=False, offloads=False, write=trtllm.write_trtllm,
        remark="TensorRT-LLM installs on GPU machines only",
        left_out=("all_to_all", "chunked_prefill_tokens"),
    ),
    "dynamo": ExportFormat(
        engine="vllm", validated=False, offloads=False, needs_image=True, write=dynamo.write_dynamo,
        remark="the schema of DynamoGraphDeployment is not on the package index",
    ),
    "llm-d": ExportFormat(
        engine="vllm", validated=False, needs_image=True, write=kubernetes.write_llm_d,
        remark="the chart llm-d-modelservice is not on the package index",
    ),
    "kserve": ExportFormat(
        engine="vllm", validated=False, remark="the schema of LLMInferenceService is alpha",
        write=kubernetes.write_kserve,
    ),
    "ray": ExportFormat(
        engine="vllm", validated=True, remark="the schemas of Ray Serve LLM 2.60.0",
        write=ray.write_ray,
    ),
}  # fmt: skip
"""Formats by name, as `--to` takes them."""


def export(plan: Plan, name: str | None = None, *, image: str | None = None) -> Texts:
    """
    Return a plan's files in a format of `FORMATS`.

    Args:
        name: key of `FORMATS`; `None`: the commands of the plan's engine.
        image: container image, where the files name one.

    Raises:
        InputError: no such format; a plan of another engine; no image where one is needed; a
            layout or a setting that the stack lacks.
    """
    name = name or plan.engine.name
    one_of(tuple(FORMATS), **{"--to": name})
    if plan.engine.name not in {"vllm", name}:
        planned = plan.engine.name
        expected = f"{planned}: the plan is of that engine, whose settings and rules it has"
        raise InputError("--to", name, expected, "plan again with engine.name = vllm")
    to = FORMATS[name]
    if to.needs_image and image is None:
        expected = f"the container image that {name} starts"
        raise InputError("--image", None, expected, "such as --image NAME:TAG")
    if plan.engine.kv_offload is not None and not to.offloads:
        names = ", ".join(other for other, form in FORMATS.items() if form.offloads)
        expected = (
            f"one of {names}: the plan has engine.kv_offload, which is written as vLLM's connectors"
        )
        raise InputError("--to", name, expected, "plan without kv_offload_host_bytes")
    pools = {pool.role: engines_of(plan, pool) for pool in plan.pools}
    texts = to.write(plan, pools, image or "")
    return {file: _head(plan, pools, to) + text for file, text in texts.items()}


def _head(plan: Plan, pools: Pools, to: ExportFormat) -> str:
    """Return the comment above every file: how far it is checked, and what was planned for what."""
    checked = f"{'Checked in a test with' if to.validated else 'not validated:'} {to.remark}."
    if plan.engine.kv_offload is not None:
        checked += " Of KV offloading only vLLM's KVTransferConfig was checked; it was never run."
    missing = [f"engine.{name}" for name in to.left_out if getattr(plan.engine, name)]
    checked += f" Not carried: {', '.join(missing)}." if missing else ""
    layout = ", ".join(
        f"{role} {engines.pool.replicas} x {engines.pool.slicing}"
        for role, engines in pools.items()
    )
    return (
        f"# {checked}\n{'' if plan.engine.lora is None else NAME_ADAPTERS}"
        f"# {plan.model.id}: {layout}; {plan.cost.gpus} GPUs, by minicluster"
        f" {plan.provenance.version} from inputs {plan.provenance.inputs_hash}.\n"
        f"# Planned for {plan.engine.name} {plan.engine.version}: predicted latencies are of that"
        " engine.\n"
    )
