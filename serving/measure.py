"""`serving measure`: time this machine's engines, deployed as they will be deployed."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path  # noqa: TC003  (Typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import aiohttp
import numpy as np
import typer

from serving.deploy import Site
from serving.deployed import deployed
from serving.grid import GridPoint, time_grid
from serving.ports import free_ports
from serving.stopwatch import Stopwatch
from serving.terminal import progress
from sizing.child import terminable
from sizing.errors import TargetFailed
from sizing.machine import this_machine
from sizing.plan import read_deployment
from sizing.shell import talk
from sizing.specs.measurement import Measurement, write_measurements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sizing.plan import Deployment

REQUEST_LIMIT_S = 60.0
SEED = 1


def measure(
    what: Annotated[Path, typer.Argument(help="plan or deployment (JSON) to deploy and time")],
    out: Annotated[Path, typer.Option("-o", "--out", help="steps.csv to write")],
    port: Annotated[
        int, typer.Option(help="of the endpoint while measuring; 0: any", min=0, max=65535)
    ] = 0,
) -> None:
    """Deploy both pools, time a grid of steps alone and beside a busy other pool, take down."""
    deployment = read_deployment(what)
    site = Site(
        target="cpu" if deployment.pool("prefill").gpu == "cpu" else "gpu",
        host="127.0.0.1",
        port=port or free_ports(1)[0],
    )
    with progress() as told, terminable(), deployed(deployment, site, told=told) as endpoint:
        points = asyncio.run(time_deployment(deployment, endpoint.base_url, told))
    write_measurements(out, _rows(deployment, points))
    talk.print(f"{len(points)} grid points: {out}")


async def time_deployment(
    deployment: Deployment, base_url: str, tell: Callable[[str], None]
) -> tuple[GridPoint, ...]:
    """Time every grid point of a deployment that is up at *base_url*."""
    limit = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    pool = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(timeout=limit, connector=pool) as session:
            watch = Stopwatch(
                session=session,
                base_url=base_url,
                model=deployment.model.id,
                vocab_size=deployment.architecture.vocab_size,
                rng=np.random.default_rng(SEED),
            )
            return await time_grid(watch, tell)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TargetFailed(f"{base_url}: {type(error).__name__} while timing: {error}") from None


def _rows(deployment: Deployment, points: Sequence[GridPoint]) -> tuple[Measurement, ...]:
    """Say of each grid point what machine, engine and model it was taken on, and when."""
    key = this_machine(
        deployment.engine.name,
        model_config_hash=deployment.model.config_hash,
        dtype=deployment.pool("decode").dtype,
    )
    today = datetime.now(UTC).date().isoformat()
    return tuple(Measurement(date=today, key=key, **asdict(point)) for point in points)
