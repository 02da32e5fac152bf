"""A plan as a compose file: head, a worker per raylet, Prometheus, Grafana and the load test."""

from __future__ import annotations

from itertools import takewhile
from shlex import quote
from typing import TYPE_CHECKING

from serving.api.auth import KEYS_FILE
from serving.cluster.raylets import OBJECT_STORE_BYTES, ray_options
from serving.deployment.manifest import KEYS_NAME, as_yaml, rendered

if TYPE_CHECKING:
    from serving.deployment.manifest import Manifest


def compose(manifest: Manifest) -> str:
    """Return the compose file (Compose Specification)."""
    text, documents = rendered(
        "compose.yaml.j2",
        {"here": _here, "quote": quote, "ray_options": ray_options},
        manifest=manifest,
        keys_file=KEYS_FILE,
        keys_name=KEYS_NAME,
        object_store_bytes=OBJECT_STORE_BYTES,
    )
    comments = takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    return "".join(comments) + as_yaml(*documents)


def _here(path: str) -> str:
    """Return a path for compose, where relative paths begin with `./`."""
    return path if path.startswith(("/", "./", "../")) else f"./{path}"
