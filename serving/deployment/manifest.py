"""A compiled plan as files that other tools deploy: what `serving up` would start, written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from serving.api.api_keys import KEYS_FILE
from serving.deployment.import_path import OPEN
from serving.protocol.app_spec import APP, ServedApp

IMPORT_PATH = "serving.replicas.app:from_plan"
KEYS_NAME = "minicluster-keys"
"""Secret with a file of API keys, for what knows secrets."""

KEYS_PATH = f"/etc/{KEYS_NAME}/keys.txt"
"""Where that file lies on the head."""

BOUNDS = (
    "num_replicas",
    "max_ongoing_requests",
    "max_queued_requests",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
)
"""What an operator may change in the file; all else would contradict the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """
    What every format is written from.

    Attributes:
        served: compiled from the plan.
        target: `cpu` or `gpu`.
        plan: text of the plan.
        plan_path: where the plan lies, for whoever reads the file.
        model_source: directory of the model there, or its name on a hub.
        plan_file: where the plan lies here.
        model_here: where the model lies here.
        image: container image that holds minicluster and its stack.
        everybody: may use the endpoint, without a key.
        port: of the endpoint.
    """

    served: ServedApp
    target: str
    plan: str
    plan_path: str
    model_source: str
    plan_file: str
    model_here: str
    image: str
    everybody: bool = False
    port: int = 8000


def ray_serve(manifest: Manifest) -> dict[str, Any]:
    """Return the configuration that `serve deploy` takes (ray.serve.schema.ServeDeploySchema)."""
    args = {
        "plan": manifest.plan_path,
        "target": manifest.target,
        "model": manifest.model_source,
        **({"access": OPEN} if manifest.everybody else {}),
    }
    keys = {"runtime_env": {"env_vars": {KEYS_FILE: KEYS_PATH}}}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "0.0.0.0", "port": manifest.port},  # noqa: S104  (a cluster's)
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": args,
                **({} if manifest.everybody else keys),
                "external_scaler_enabled": True,
                "deployments": [
                    {"name": pool.name}
                    | {
                        key: value
                        for key, value in pool.llm_config["deployment_config"].items()
                        if key in BOUNDS
                    }
                    for pool in manifest.served.pools
                ],
            }
        ],
    }


def as_yaml(*documents: object) -> str:
    """Write YAML, keys in the order given, long texts as blocks."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and equal parts twice instead of by reference."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        """Never refer."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Write a text."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
