"""Where and when a run was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.run.client_health import Client
    from loadtest.run.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetadata:
    """Where and when: target, client machine and versions."""

    host: str
    model: str
    seed: int
    warmup_s: float
    window_s: float
    started_unix_s: float
    wall_s: float
    machine: str
    versions: dict[str, str]


def setting_of(job: Job, client: Client) -> RunMetadata:
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
