"""Applications of Ray Serve LLM: written of a plan without this project's endpoint, and read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minicluster.errors import InputError
from minicluster.plan.vllm_args import KV_ROLES
from sizing.stacks.documents import rows, table
from sizing.stacks.engines import Pools, Texts, yaml_text
from sizing.stacks.flags import flags, only, positive
from sizing.stacks.script import Launch
from sizing.stacks.vllm import engine_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minicluster.plan import Plan


def write_ray(plan: Plan, pools: Pools, _image: str) -> Texts:
    """Return a Serve config; `serving manifest` writes one with admission, routing and keys."""
    configs: dict[str, Any] = {}
    for role, engines in pools.items():
        accelerator = engines.pool.ray_accelerator
        model = {"model_id": plan.model.id, "model_source": plan.model.source}
        configs[role] = {
            "model_loading_config": model,
            **({"accelerator_type": accelerator} if accelerator else {}),
            "engine_kwargs": engine_arguments(engines, kv_role=KV_ROLES.get(role)),
            "deployment_config": {"num_replicas": engines.pool.replicas},
        }
    if "mixed" in configs:
        path, args = "build_openai_app", {"llm_configs": [configs["mixed"]]}
    else:
        path, args = "build_pd_openai_app", {f"{role}_config": configs[role] for role in KV_ROLES}
    application = {"name": "llm", "route_prefix": "/", "import_path": f"ray.serve.llm:{path}"}
    return {"ray-serve-llm.yaml": yaml_text({"applications": [application | {"args": args}]})}


def read_ray(document: Mapping[str, Any], place: str, _notes: list[str]) -> Iterator[Launch]:
    """Yield the engines of a Serve config's applications, whose arguments are a table."""
    for application in rows(document, "applications", place):
        path, args = f"{application.get('import_path')}", table(application, "args", place)
        if not path.startswith("ray.serve.llm:build_"):
            way_out = (
                "a script of its commands is read; of `serving manifest` the plan says what runs"
            )
            raise InputError(f"{place}: import_path", path, "ray.serve.llm:build_…", way_out)
        only(args, "ray", place)
        by_role = [(None, row) for row in rows(args, "llm_configs", place)]
        split = [(role, table(args, f"{role}_config", place)) for role in KV_ROLES]
        for role, row in [*by_role, *((role, row) for role, row in split if row)]:
            only(row, "ray_llm", place)
            model = table(row, "model_loading_config", place)
            source = model.get("model_source") or model.get("model_id")
            words = flags(table(row, "engine_kwargs", place))
            count = table(row, "deployment_config", place)
            only(count, "ray_deployment", place)
            yield Launch(
                words=(*([f"{source}"] if source else []), *words), place=place, role=role,
                replicas=positive(count.get("num_replicas", 1), f"{place}: num_replicas"),
            )  # fmt: skip
