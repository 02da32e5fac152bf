"""`serving measure`: step times of the engines deployed from this directory."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import typer

from minicluster.command import terminable
from minicluster.errors import Fault, InputError, TargetFailed
from minicluster.shell import talk
from serving.cli.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minicluster.contention import CpuTimes
    from minicluster.plan import Deployment
    from minicluster.specs.calibration import Measurement
    from serving.cluster.state import State
    from serving.measurement.step_benchmark import GridPoint

SEED = 1


def measure(
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, steps.csv.")],
) -> None:
    """Time a grid of steps of the deployed pools, each alone and beside the other one busy."""
    import asyncio

    from minicluster.plan import read_deployment
    from minicluster.specs.calibration import write_measurements
    from serving.cluster.state import DEPLOYMENT
    from serving.deployment.engine_args import SIMULATED
    from serving.operations.status import current

    state = current()
    deployment = read_deployment(DEPLOYMENT)
    if {pool.role for pool in deployment.pools} != {"prefill", "decode"}:
        fault = Fault("has a mixed pool")
        raise InputError(state.base_url, fault, "one with a prefill and a decode pool to time")
    with progress() as report, terminable():
        points = asyncio.run(time_deployment(deployment, state, report))
    rows = _rows(deployment, points)
    if state.target == SIMULATED:  # a calibration of no machine
        rows = tuple(replace(row, key=replace(row.key, processor=SIMULATED)) for row in rows)
    write_measurements(out, rows)
    talk.print(f"{len(points)} rows: {out}", highlight=False, soft_wrap=True)


async def time_deployment(
    deployment: Deployment, state: State, report: Callable[[str], None]
) -> tuple[GridPoint, ...]:
    """
    Time every grid point of a running deployment.

    Raises:
        TargetFailed: a request failed.
    """
    import aiohttp
    import numpy as np

    from minicluster.contention import cpu_times
    from serving.api.access import authorization
    from serving.api.tls import trusting
    from serving.cluster.processes import cluster_processes
    from serving.measurement.step_benchmark import Extent, TimingClient, time_grid

    def clock() -> CpuTimes:
        times = cpu_times(
            {*cluster_processes(state.cluster_id), os.getpid()} if state.cluster_id else ()
        )
        # On a foreign cluster the engines cannot be told from other processes.
        return times if state.cluster_id else replace(times, ours_s=times.busy_s)

    pool = aiohttp.TCPConnector(limit=0, ssl=trusting(state.tls_cert) or True)
    no_limit = aiohttp.ClientTimeout(total=None)
    try:
        async with aiohttp.ClientSession(
            timeout=no_limit, connector=pool, headers=authorization(os.environ)
        ) as session:
            client = TimingClient(
                session=session,
                base_url=state.base_url,
                model=deployment.model.id,
                vocab_size=deployment.model.vocab_size,
                rng=np.random.default_rng(SEED),
            )
            return await time_grid(client, Extent.of(deployment), report, clock)
    except aiohttp.ClientError as error:
        raise TargetFailed(
            f"{state.base_url}: {type(error).__name__} while timing: {error}"
        ) from None


def _rows(deployment: Deployment, points: Sequence[GridPoint]) -> tuple[Measurement, ...]:
    from minicluster.machine import this_machine
    from minicluster.specs.calibration import Measurement

    key = this_machine(
        deployment.engine.name,
        model_config_hash=deployment.model.config_hash,
        dtype=deployment.pool("decode").dtype,
    )
    today = datetime.now(UTC).date().isoformat()
    return tuple(Measurement(date=today, key=key, **asdict(point)) for point in points)
