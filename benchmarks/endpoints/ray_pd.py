"""
Ray's own prefill/decode application, with the settings of our replicas.

    python benchmarks/endpoints/ray_pd.py DEPLOYMENT PORT default|0

Serves until its standard input ends; the last argument is the batching interval of its streams.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from minicluster.plan import read_deployment
from serving.deployment.engine_args import DeployTarget, engine_kwargs, environment

NIXL_PORTS = {"default": 26_000, "0": 28_000}


def main(deployment: Path, port: int, interval: str) -> None:
    """Start, say so, wait, stop."""
    import ray  # noqa: PLC0415  (seconds)
    from ray import serve  # noqa: PLC0415
    from ray.serve.llm import LLMConfig, build_pd_openai_app  # noqa: PLC0415

    given = read_deployment(deployment)
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    configs = {
        f"{role}_config": LLMConfig(**_config(given, role, interval))
        for role in ("prefill", "decode")
    }
    serve.run(build_pd_openai_app(configs), name="pd")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


def _config(deployment: Any, role: str, interval: str) -> dict[str, Any]:  # noqa: ANN401
    """Return the fields of one `LLMConfig`."""
    pool, target = deployment.pool(role), DeployTarget(kind="cpu")
    core = pool.placement[0].gpus[0]
    settings = {
        **environment(deployment, [(core,)], target),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }
    batching = {} if interval == "default" else {"stream_batching_interval_ms": int(interval)}
    base = NIXL_PORTS[interval] + (1_000 if role == "decode" else 0)
    return {
        "model_loading_config": {
            "model_id": deployment.model.id,
            "model_source": deployment.model.source,
        },
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundle_per_worker": {"CPU": 1}, "strategy": "STRICT_PACK"},
        "engine_kwargs": engine_kwargs(deployment, pool, target),
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
        "experimental_configs": {**batching, "NIXL_SIDE_CHANNEL_PORT_BASE": base},
        "runtime_env": {"env_vars": settings},
        "log_engine_metrics": False,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
