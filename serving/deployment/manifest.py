"""A plan for other tools: as text for Ray Serve, KubeRay and compose, and what they import."""

from __future__ import annotations

import math
from collections import Counter
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import yaml
from jinja2 import Environment, StrictUndefined

from minicluster.errors import InputError
from minicluster.plan import read_plan, to_json
from serving.api.access import HOSTS, KEYS, KEYS_FILE
from serving.cluster.raylets import OBJECT_STORE_BYTES, ray_options
from serving.deployment.compile import DRAIN_LIMIT_S, compile_app, kind_of, ray_nodes
from serving.deployment.engine_args import DeployTarget, read_media_domains
from serving.deployment.feasibility import RAY, findings, plan_findings, refuse
from serving.deployment.target import is_directory, located, this_machine
from serving.request.cost import read_token_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from minicluster.plan import Deployment, Plan
    from serving.protocol.app_spec import ServedApp

FORMATS = ("ray-serve", "kuberay", "compose")
"""Each has a template in this folder."""

OPEN = "open"
"""Value of the argument `access`: the endpoint asks for no key."""

KEYS_NAME = "minicluster-keys"
"""Name of the secret that holds a file of API keys."""

KEYS_PATH = f"/etc/{KEYS_NAME}/keys.txt"
"""Path of that file on the head."""

PORT = 8000
"""Port of the endpoint."""

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

HEAD_CPUS = 3
"""CPUs of the head for Ray's own processes, the proxy and the gate; each endpoint has one more."""

STOP_MARGIN_S = 60.0
"""Time for the replicas, Ray and the commands to end, after the drain."""

PLAN_DIRECTORY = "/etc/minicluster"
"""Directory of the plan in pods and containers."""


def manifest_text(
    plan: Plan,
    file: Path,
    kind: str,
    *,
    image: str,
    model: str | None = None,
    open_access: bool = False,
) -> str:
    """
    Return the deployment of a plan on its own hosts as a file for another tool.

    Args:
        plan: content of *file*, which compose mounts and Ray Serve reads.
        file: path on this machine.
        kind: one of `FORMATS`.
        image: container image that holds minicluster and its stack.
        model: directory of the model on the hosts, or its name on a hub; `None`: the plan's.
        open_access: the endpoint asks for no key.
    """
    deployment, source = located(plan.deployment, model), plan.model.source
    target = DeployTarget(kind=kind_of(deployment), one_host=False)
    served = compile_app(deployment, target, plan=plan)
    values = {
        "served": served,
        "open_access": open_access,
        "plan_json": to_json(plan),
        "plan_path": str(file.absolute()) if kind == "ray-serve" else f"{PLAN_DIRECTORY}/plan.json",
        "plan_file": str(file),
        "plan_directory": PLAN_DIRECTORY,
        "model_source": deployment.model.source,
        "model_here": source if is_directory(source) else deployment.model.source,
        "image": image,
        "port": PORT,
        "hosts": HOSTS,
        "keys_file": KEYS_FILE,
        "keys_name": KEYS_NAME,
        "keys_path": KEYS_PATH,
        "keys_directory": str(Path(KEYS_PATH).parent),
        "stop_s": stop_s(served),
        "ray": RAY,
        "head_probe": HEAD_PROBE.format(port=PORT),
        "head_cpus": HEAD_CPUS + served.endpoints,
        "budgets": {"head": 1} | Counter(node.role for node in served.nodes),
        "object_store_bytes": OBJECT_STORE_BYTES,
        "open_files": OPEN_FILES,
    }
    if kind == "kuberay":
        values["serve_config"] = _rendered("ray-serve", values)
    return _rendered(kind, values)


def manifest_findings(deployment: Deployment) -> Iterator[str]:
    """Yield what a deployment has that no manifest says."""
    if deployment.engine.lora is not None:
        yield (
            "engine.lora: a manifest names no adapters (`serving up --lora-modules`, or plan"
            " without max_loras)"
        )


def _rendered(kind: str, values: Mapping[str, object]) -> str:
    environment = Environment(
        autoescape=False,  # noqa: S701  (YAML: `tojson` escapes)
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"here": _here, "quote": quote, "ray_options": ray_options}
    template = Path(__file__).with_name(f"{kind}.yaml.j2").read_text(encoding="utf-8")
    text = environment.from_string(template).render(values)
    comments = takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    documents = yaml.safe_load_all(text)
    laid_out: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
    return "".join(comments) + laid_out


def stop_s(served: ServedApp) -> int:
    """Return the whole seconds that a head may take from SIGTERM to its end."""
    drains_s = [
        float(pool.llm_config["deployment_config"]["graceful_shutdown_timeout_s"])
        for pool in served.pools
    ]
    return math.ceil(min(max(drains_s), DRAIN_LIMIT_S) + STOP_MARGIN_S)


def _here(path: str) -> str:
    return path if path.startswith(("/", "./", "../")) else f"./{path}"


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

    `serve deploy` and KubeRay import this through `serving.replicas.app.from_plan`. *args* are
    `plan`, the file; `model`, its path on every host; `access`: `open` for no keys.

    Raises:
        InputError: there are no API keys, and access is not open; or as `read_plan`.
        NegativeAnswer: the plan cannot be realised; one reason per line.
    """
    if args.get("access") != OPEN and not {KEYS, KEYS_FILE} & environment.keys():
        # The file is on the head alone, and this may run on another host.
        expected = f"{KEYS_FILE}, a file of API keys"
        way_out = "or args.access: open, for an endpoint without keys"
        raise InputError("runtime_env.env_vars", None, expected, way_out)
    plan = read_plan(Path(args["plan"]))
    deployment = located(plan.deployment, args.get("model"))
    kind = kind_of(deployment)
    # Serve waits for missing nodes, so the plan's nodes count as present.
    nodes = tuple(node.labels for node in ray_nodes(deployment, kind))
    refuse(
        [
            *plan_findings(plan),
            *manifest_findings(deployment),
            *findings(deployment, this_machine(kind, nodes)),
        ]
    )
    target = DeployTarget(
        kind=kind,
        one_host=False,
        token_limit=read_token_limit(environment),
        media_domains=read_media_domains(environment),
    )
    return compile_app(deployment, target, plan=plan)
