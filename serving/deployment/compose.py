"""A plan as a compose file: head, a worker per raylet, Prometheus, Grafana and the load test."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from serving.api.auth import KEYS_FILE
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
#                                             once: the token of Ray's processes
#   docker compose up -d --build              head and workers, Prometheus, Grafana
#   docker compose logs -f head               until `ready:`
#   docker compose run --rm load              the plan's load, and the verdict
#   docker compose down
#
# Endpoint 127.0.0.1:8000, Prometheus 127.0.0.1:9090, Grafana 127.0.0.1:3000.
# Workers reach each other by TCP alone: no shared memory crosses containers.
"""
OPEN = """\
# Without API keys (--open): the ports are published to this machine only.
"""
LOCKED = """\
# The endpoint needs an API key: KEYS=FILE, one key per line; default: ./keys.txt.
"""
RAY_TOKEN = "ray-token"  # noqa: S105  (its name)
"""Name of the secret that holds the token of the Ray cluster, for head and workers."""

HEAD_PORT = 6379
CLIENT_KEY = "MINICLUSTER_API_KEY"
"""Variable from which `loadtest` takes its API key."""

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
    if not manifest.open_access:
        secrets[KEYS_NAME] = {"file": "${KEYS:-./keys.txt}"}
    access = OPEN if manifest.open_access else LOCKED
    return HEADER + access + as_yaml(whole | {"secrets": secrets})


def head_command(manifest: Manifest) -> str:
    """Return the head's command: Ray without devices, then the deployment."""
    return (
        f"ray start --head --port={HEAD_PORT} --node-ip-address=$(hostname -i) --num-cpus=0 "
        f"--object-store-memory={OBJECT_STORE_BYTES} --include-dashboard=false "
        "--disable-usage-stats && "
        f"serving up {manifest.plan_path} --model {quote(manifest.model_source)} "
        f"--address $(hostname -i):{HEAD_PORT} --host 0.0.0.0 --port {manifest.port} "
        f"--wait {WAIT_S}{' --open' if manifest.open_access else ''} && exec sleep infinity"
    )


def worker_command(node: RayNode) -> str:
    """Return a worker's command."""
    return (
        f"exec ray start --address=head:{HEAD_PORT} --node-ip-address=$(hostname -i) "
        f"{' '.join(ray_options(node))} --block"
    )


def _head(manifest: Manifest) -> dict[str, Any]:
    """Return the service of the head; it alone has the API keys, for the endpoint."""
    service = _node(manifest, head_command(manifest))
    if not manifest.open_access:
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
    """Return the settings that head and workers share."""
    volumes = [_plan(manifest)]
    if manifest.model_source.startswith("/"):
        # Prefill and decode compare this path before they transfer a KV cache.
        volumes.append(f"${{MODEL:-{_path(manifest.model_here)}}}:{manifest.model_source}:ro")
    return {
        "image": manifest.image,
        # `$$` is a dollar for the container's shell; compose expands a single one.
        "command": ["bash", "-c", command.replace("$(", "$$(")],
        "environment": {
            MODE: "token",
            TOKEN_PATH: f"/run/secrets/{RAY_TOKEN}",
            "RAY_worker_niceness": "0",
        },
        "secrets": [RAY_TOKEN],
        # After a restart `serving up` clears the state of the last deployment.
        "restart": "unless-stopped",
        "shm_size": SHM,
        "volumes": volumes,
    }


def _plan(manifest: Manifest) -> str:
    return f"${{PLAN:-{_path(manifest.plan_file)}}}:{manifest.plan_path}:ro"


def _path(path: str) -> str:
    """Return a path for compose, where relative paths begin with `./`."""
    return path if path.startswith(("/", "./", "../")) else f"./{path}"


def _load(manifest: Manifest) -> dict[str, Any]:
    key = {} if manifest.open_access else {"environment": {CLIENT_KEY: f"${{{CLIENT_KEY}:-}}"}}
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
