"""Metadata of a run: endpoint, time, client machine and versions."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from minicluster.machine import processor

if TYPE_CHECKING:
    from loadtest.run.client_health import Client
    from loadtest.run.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetadata:
    """Metadata of a run, as in `verdict.json`."""

    host: str
    model: str
    seed: int
    warmup_s: float
    window_s: float
    started_unix_s: float
    wall_s: float
    machine: str
    versions: dict[str, str]


def run_metadata(job: Job, client: Client) -> RunMetadata:
    """Describe the run of *job* by *client*."""
    return RunMetadata(
        host=job.host,
        model=job.model,
        seed=job.seed,
        warmup_s=job.window.start_s,
        window_s=job.window.length_s,
        started_unix_s=client.started_unix_s,
        wall_s=client.wall_s,
        machine=client.machine,
        versions=client.versions,
    )


def versions(**more: str) -> dict[str, str]:
    """Return the versions of this package and of Python, and *more*."""
    return {
        "minicluster": metadata.version("minicluster"),
        "python": platform.python_version(),
    } | more


def machine() -> str:
    """Return processor, system and kernel of this machine."""
    return f"{processor()}, {platform.system()} {platform.release()}"
