"""A compiled plan for other tools: for Ray Serve, KubeRay and compose, and what they import."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, StrictUndefined

from minicluster.errors import InputError
from minicluster.plan import read_plan
from serving.api.auth import HOSTS
from serving.api.keys import KEYS, KEYS_FILE
from serving.cluster.raylets import OBJECT_STORE_BYTES, ray_options
from serving.deployment.compile import DRAIN_LIMIT_S, compile_app, ray_nodes
from serving.deployment.engine_args import DeployTarget, read_media_domains
from serving.deployment.feasibility import RAY, findings, plan_findings, refuse
from serving.deployment.target import located, this_machine
from serving.protocol.app_spec import APP, ServedApp
from serving.request.length import read_token_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

OPEN = "open"
"""Value of the argument `access`: the endpoint asks for no key."""

IMPORT_PATH = "serving.replicas.app:from_plan"
KEYS_NAME = "minicluster-keys"
"""Name of the secret that holds a file of API keys."""

KEYS_PATH = f"/etc/{KEYS_NAME}/keys.txt"
"""Path of that file on the head."""

PORT = 8000
"""Port of the endpoint."""

SERVICE = f"{APP}-serve-svc"
"""Name of the service that KubeRay makes for the endpoint."""
HEAD_PROBE = """\
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:{port}" + sys.argv[1], timeout=9)
except urllib.error.HTTPError as error:
    sys.exit(error.code >= 500)
except urllib.error.URLError as error:
    sys.exit(not isinstance(error.reason, ConnectionRefusedError))
"""
"""Kubernetes' probe of the head: the endpoint answers a path without an error of the server, or
nothing is deployed there yet (no listener, or 404 of Ray Serve's proxy)."""

OPEN_FILES = 65536
"""Limit of open files of a container's process: each connection of Ray or a client is one."""

STOP_MARGIN_S = 60.0
"""Time for the replicas, Ray and the commands to end, after the drain."""

PLAN_DIRECTORY = "/etc/minicluster"
"""Directory of the plan in pods and containers."""

BOUNDS = (
    "num_replicas",
    "max_ongoing_requests",
    "max_queued_requests",
    "graceful_shutdown_timeout_s",
    "health_check_period_s",
    "health_check_timeout_s",
)
"""The options that an operator may change in the file; all others follow from the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """
    The input of every manifest format.

    Attributes:
        served: compiled from the plan.
        target: `cpu` or `gpu`.
        plan: text of the plan.
        plan_path: path of the plan on the hosts.
        model_source: directory of the model on the hosts, or its name on a hub.
        plan_file: path of the plan on this machine.
        model_here: path of the model on this machine.
        image: container image that holds minicluster and its stack.
        open_access: the endpoint asks for no key.
    """

    served: ServedApp
    target: str
    plan: str
    plan_path: str
    model_source: str
    plan_file: str
    model_here: str
    image: str
    open_access: bool = False


def ray_serve(manifest: Manifest) -> dict[str, Any]:
    """Return the configuration that `serve deploy` takes (ray.serve.schema.ServeDeploySchema)."""
    args = {
        "plan": manifest.plan_path,
        "target": manifest.target,
        "model": manifest.model_source,
        **({"access": OPEN} if manifest.open_access else {}),
    }
    access = {HOSTS: SERVICE} if manifest.open_access else {KEYS_FILE: KEYS_PATH}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "0.0.0.0", "port": PORT},  # noqa: S104  (a cluster's)
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": args,
                "runtime_env": {"env_vars": access},
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


def ray_service(manifest: Manifest) -> str:
    """
    Return a plan as Kubernetes objects for KubeRay.

    The YAML holds a ConfigMap with the plan, a NetworkPolicy, a RayService, and for its head and
    each role a PodDisruptionBudget.
    """
    _, documents = _rendered(
        "kuberay.yaml.j2",
        manifest,
        serve_config=as_yaml(ray_serve(manifest)),
        ray=RAY,
        head_probe=HEAD_PROBE.format(port=PORT),
        budgets={"head": 1} | Counter(node.role for node in manifest.served.nodes),
        plan_directory=PLAN_DIRECTORY,
        keys_directory=str(Path(KEYS_PATH).parent),
    )
    return as_yaml(*documents)


def compose(manifest: Manifest) -> str:
    """
    Return a plan as a compose file (Compose Specification).

    It has the head, a worker for each raylet, Prometheus, Grafana and the load test.
    """
    text, documents = _rendered(
        "compose.yaml.j2",
        manifest,
        keys_file=KEYS_FILE,
        object_store_bytes=OBJECT_STORE_BYTES,
        hosts=HOSTS,
        open_files=OPEN_FILES,
    )
    comments = takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    return "".join(comments) + as_yaml(*documents)


def _rendered(name: str, manifest: Manifest, **values: object) -> tuple[str, list[Any]]:
    """Return the text of the template *name* of this folder, and its documents."""
    environment = Environment(
        autoescape=False,  # noqa: S701  (YAML: `tojson` escapes)
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"here": _here, "quote": quote, "ray_options": ray_options}
    template = (Path(__file__).parent / name).read_text(encoding="utf-8")
    text = environment.from_string(template).render(
        manifest=manifest, port=PORT, keys_name=KEYS_NAME, stop_s=stop_s(manifest), **values
    )
    return text, list(yaml.safe_load_all(text))


def stop_s(manifest: Manifest) -> int:
    """Return the whole seconds that a head may take from SIGTERM to its end."""
    drains_s = [
        float(pool.llm_config["deployment_config"]["graceful_shutdown_timeout_s"])
        for pool in manifest.served.pools
    ]
    return math.ceil(min(max(drains_s), DRAIN_LIMIT_S) + STOP_MARGIN_S)


def _here(path: str) -> str:
    """Return a path for compose, where relative paths begin with `./`."""
    return path if path.startswith(("/", "./", "../")) else f"./{path}"


def as_yaml(*documents: object) -> str:
    """Return YAML with keys in their order and long texts as blocks."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and equal parts in full instead of by reference."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        """Return that no part is written as a reference."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def compile_from_args(args: Mapping[str, str], environment: Mapping[str, str]) -> ServedApp:
    """
    Compile a plan on its own hosts, with the checks of `serving up`.

    `serve deploy` and KubeRay import this through `serving.replicas.app.from_plan`.

    Args:
        args: `plan`, the file; `target`, `cpu` or `gpu`; `model`, its path on every host;
            `access`, `open` for an endpoint that asks for no key.
        environment: names keys and the longest answer (`serving.api.keys`,
            `serving.request.length`).

    Raises:
        InputError: there are no API keys, and access is not open; or as `read_plan`.
        NegativeAnswer: the plan cannot be realised; one reason per line.
    """
    if args.get("access") != OPEN and not {KEYS, KEYS_FILE} & environment.keys():
        # The file is on the head alone, and this may run on another host.
        expected = f"{KEYS_FILE}, a file of API keys"
        way_out = "or args.access: open, for an endpoint without keys"
        raise InputError("runtime_env.env_vars", None, expected, way_out)
    plan, kind = read_plan(Path(args["plan"])), args["target"]
    deployment = located(plan.deployment, args.get("model"))
    # Serve waits for missing nodes, so the plan's nodes count as present.
    nodes = tuple(node.labels for node in ray_nodes(deployment, kind))
    refuse([*plan_findings(plan, kind), *findings(deployment, this_machine(kind, nodes))])
    target = DeployTarget(
        kind=kind,
        one_host=False,
        token_limit=read_token_limit(environment),
        media_domains=read_media_domains(environment),
    )
    return compile_app(deployment, target, plan=plan)
