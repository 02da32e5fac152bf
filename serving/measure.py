"""`serving measure`: time the engines that are deployed from this directory."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import aiohttp
import numpy as np
import typer

from serving.grid import GridPoint, time_grid
from serving.keys import authorization
from serving.processes import marked
from serving.status import current
from serving.stopwatch import Stopwatch
from serving.terminal import progress
from sizing.child import terminable
from sizing.contention import cpu_times
from sizing.errors import InputError, TargetFailed
from sizing.machine import this_machine
from sizing.plan import read_deployment
from sizing.shell import talk
from sizing.specs.measurement import Measurement, write_measurements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.state import State
    from sizing.contention import CpuTimes
    from sizing.plan import Deployment

SEED = 1


def measure(
    out: Annotated[Path, typer.Option("-o", "--out", help="steps.csv to write.")],
) -> None:
    """Time a grid of steps of what is deployed here, each pool alone and beside a busy other."""
    state = current()
    deployment = read_deployment(Path(state.deployment))
    if {pool.role for pool in deployment.pools} != {"prefill", "decode"}:
        raise InputError("serving", "a mixed pool", "a prefill and a decode pool to time")
    with progress() as told, terminable():
        points = asyncio.run(time_deployment(deployment, state, told))
    write_measurements(out, _rows(deployment, points))
    talk.print(f"{len(points)} rows: {out}", highlight=False, soft_wrap=True)


async def time_deployment(
    deployment: Deployment, state: State, tell: Callable[[str], None]
) -> tuple[GridPoint, ...]:
    """
    Time every grid point of a deployment that is up.

    Raises:
        TargetFailed: a request failed.
    """

    def clock() -> CpuTimes:
        times = cpu_times({*marked(state.cluster_id), os.getpid()} if state.cluster_id else ())
        # On a cluster that we did not start nothing tells the engines from other processes.
        return times if state.cluster_id else replace(times, ours_s=times.busy_s)

    pool, endless = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    try:
        async with aiohttp.ClientSession(
            timeout=endless, connector=pool, headers=authorization(os.environ)
        ) as session:
            watch = Stopwatch(
                session=session,
                base_url=state.base_url,
                model=deployment.model.id,
                vocab_size=deployment.architecture.vocab_size,
                rng=np.random.default_rng(SEED),
            )
            return await time_grid(watch, tell, clock)
    except aiohttp.ClientError as error:
        raise TargetFailed(
            f"{state.base_url}: {type(error).__name__} while timing: {error}"
        ) from None


def _rows(deployment: Deployment, points: Sequence[GridPoint]) -> tuple[Measurement, ...]:
    """Say of each grid point what machine, engine and model it was taken on, and when."""
    key = this_machine(
        deployment.engine.name,
        model_config_hash=deployment.model.config_hash,
        dtype=deployment.pool("decode").dtype,
    )
    today = datetime.now(UTC).date().isoformat()
    return tuple(Measurement(date=today, key=key, **asdict(point)) for point in points)
