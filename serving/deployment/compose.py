"""A plan as a compose file: head, a worker for each raylet, and what watches and loads them."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from serving.api.api_keys import KEYS_FILE
from serving.cluster.raylets import OBJECT_STORE_BYTES, ray_options
from serving.cluster.token import MODE, TOKEN_PATH
from serving.deployment.manifest import KEYS_NAME, as_yaml

if TYPE_CHECKING:
    from serving.deployment.manifest import Manifest
    from serving.protocol.app_spec import RayNode

HEADER = """\
# Written by `serving manifest PLAN --format compose`; tests hold that it still is.
#
#   mkdir -p .minicluster && (umask 077; openssl rand -hex 32 > .minicluster/ray-token)
#                                             once: what Ray's processes know each other by
#   docker compose up -d --build              head and workers, Prometheus, Grafana
#   docker compose logs -f head               until `ready:`
#   docker compose run --rm load              the plan's load, and the verdict
#   docker compose down
#
# Endpoint 127.0.0.1:8000, Prometheus 127.0.0.1:9090, Grafana 127.0.0.1:3000.
# Workers reach each other by TCP alone: no shared memory crosses containers.
"""
OPEN = """\
# Without API keys (--open): only to this machine are the ports published.
"""
LOCKED = """\
# The endpoint wants an API key: KEYS=FILE, a key a line; default: ./keys.txt.
"""
RAY_TOKEN = "ray-token"  # noqa: S105  (its name)
"""Secret with the token of the Ray cluster, for head and workers."""

HEAD_PORT = 6379
CLIENT_KEY = "MINICLUSTER_API_KEY"
"""Variable in which `loadtest` looks for the key that it shows."""

PROMETHEUS = "prom/prometheus:v2.53.4"
GRAFANA = "grafana/grafana:11.6.0"
SHM = "2gb"
WAIT_S = 120


def compose(manifest: Manifest) -> str:
    """Return the compose file (Compose Specification)."""
    nodes = manifest.served.nodes
    services: dict[str, Any] = {"head": _head(manifest)}
    services |= {f"{node.role}-{node.node}": _worker(manifest, node) for node in nodes}
    services |= {"prometheus": _PROMETHEUS, "grafana": _GRAFANA, "load": _load(manifest)}
    whole: dict[str, Any] = {"name": "minicluster", "services": services}
    secrets = {RAY_TOKEN: {"file": f"${{RAY_TOKEN:-./.minicluster/{RAY_TOKEN}}}"}}
    if not manifest.everybody:
        secrets[KEYS_NAME] = {"file": "${KEYS:-./keys.txt}"}
    access = OPEN if manifest.everybody else LOCKED
    return HEADER + access + as_yaml(whole | {"secrets": secrets})


def head_command(manifest: Manifest) -> str:
    """Return what the head runs: Ray without a share of the pools, then the deployment."""
    return (
        f"ray start --head --port={HEAD_PORT} --node-ip-address=$(hostname -i) --num-cpus=0 "
        f"--object-store-memory={OBJECT_STORE_BYTES} --include-dashboard=false "
        "--disable-usage-stats && "
        f"serving up {manifest.plan_path} --model {quote(manifest.model_source)} "
        f"--address $(hostname -i):{HEAD_PORT} --host 0.0.0.0 --port {manifest.port} "
        f"--wait {WAIT_S}{' --open' if manifest.everybody else ''} && exec sleep infinity"
    )


def worker_command(node: RayNode) -> str:
    """Return what a worker runs."""
    return (
        f"exec ray start --address=head:{HEAD_PORT} --node-ip-address=$(hostname -i) "
        f"{' '.join(ray_options(node))} --block"
    )


def _head(manifest: Manifest) -> dict[str, Any]:
    """Return the service of the head: it alone, where the endpoint is, has the API keys."""
    service = _node(manifest, head_command(manifest))
    if not manifest.everybody:
        service["environment"][KEYS_FILE] = f"/run/secrets/{KEYS_NAME}"
        service["secrets"].append(KEYS_NAME)
    return {
        **service,
        "build": ".",
        "ports": [f"127.0.0.1:{manifest.port}:{manifest.port}"],
        "healthcheck": {
            "test": ["CMD-SHELL", f"ray health-check --address $$(hostname -i):{HEAD_PORT}"],
            "interval": "5s",
            "timeout": "10s",
            "retries": 24,
        },
    }


def _worker(manifest: Manifest, node: RayNode) -> dict[str, Any]:
    """Return the service of one raylet."""
    service = {
        **_node(manifest, worker_command(node)),
        "depends_on": {"head": {"condition": "service_healthy"}},
    }
    if node.gpus:
        devices = [{"driver": "nvidia", "device_ids": [str(gpu) for gpu in node.gpus]}]
        devices[0]["capabilities"] = ["gpu"]
        service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    return service


def _node(manifest: Manifest, command: str) -> dict[str, Any]:
    """Return what head and workers have alike."""
    volumes = [_plan(manifest)]
    if manifest.model_source.startswith("/"):
        # The path is part of what prefill and decode compare before they hand over a KV cache.
        volumes.append(f"${{MODEL:-{_path(manifest.model_here)}}}:{manifest.model_source}:ro")
    return {
        "image": manifest.image,
        # A dollar of the container's shell, not of compose.
        "command": ["bash", "-c", command.replace("$(", "$$(")],
        "environment": {
            MODE: "token",
            TOKEN_PATH: f"/run/secrets/{RAY_TOKEN}",
            "RAY_worker_niceness": "0",
        },
        "secrets": [RAY_TOKEN],
        # After a restart, of the machine too; `serving up` clears what is left of the last one.
        "restart": "unless-stopped",
        "shm_size": SHM,
        "volumes": volumes,
    }


def _plan(manifest: Manifest) -> str:
    """Return where the plan is mounted."""
    return f"${{PLAN:-{_path(manifest.plan_file)}}}:{manifest.plan_path}:ro"


def _path(path: str) -> str:
    """Return a path as compose takes it: one that is relative begins with a dot and a slash."""
    return path if path.startswith(("/", "./", "../")) else f"./{path}"


def _load(manifest: Manifest) -> dict[str, Any]:
    """Return the service that loads the endpoint as the plan says, with Locust, and judges."""
    key = {} if manifest.everybody else {"environment": {CLIENT_KEY: f"${{{CLIENT_KEY}:-}}"}}
    return key | {
        "image": manifest.image,
        "profiles": ["load"],
        "command": [
            *("loadtest", "run", manifest.plan_path),
            *("--host", f"http://head:{manifest.port}", "-o", "/out"),
        ],
        "volumes": [_plan(manifest), "./out/load:/out"],
    }


_PROMETHEUS = {
    "image": PROMETHEUS,
    "ports": ["127.0.0.1:9090:9090"],
    "volumes": ["./monitoring/prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
}
_GRAFANA = {
    "image": GRAFANA,
    "ports": ["127.0.0.1:3000:3000"],
    "depends_on": ["prometheus"],
    "environment": {"GF_AUTH_ANONYMOUS_ENABLED": "true", "GF_ANALYTICS_REPORTING_ENABLED": "false"},
    "volumes": [
        "./monitoring/grafana/provisioning:/etc/grafana/provisioning:ro",
        "./monitoring/grafana/dashboards:/var/lib/grafana/dashboards:ro",
    ],
}
