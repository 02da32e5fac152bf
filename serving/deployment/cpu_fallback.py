"""A plan reduced to what this CPU holds (`serving up --substitute`), with every change recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minicluster.errors import NegativeAnswer
from minicluster.plan import Placement
from serving.deployment.engine_args import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minicluster.plan import Deployment, Pool
    from serving.deployment.target import Target

NODE = "node-0"
KV_FRACTION = 0.1
"""Share of the free memory for all KV caches; processes and weights need the rest."""

CPU_BLOCK_SIZE = 32
COMPARED = ("gpu", "replicas", "tp", "pp", "ep", "dp", "dtype", "kv_bytes")


def substituted(deployment: Deployment, target: Target) -> tuple[Deployment, tuple[str, ...]]:
    """
    Return the part of *deployment* that fits a CPU *target*, and every change.

    TP is reduced, widest pool first, until each worker has a core; then replicas are removed from
    the largest pool. A deployment that fits is returned unchanged.

    Raises:
        NegativeAnswer: there are fewer cores than pools.
    """
    cores = sorted(target.cores)
    wanted = {gpu for pool in deployment.pools for each in pool.placement for gpu in each.gpus}
    total = sum(pool.gpus for pool in deployment.pools)
    on_cpu = all(pool.gpu == "cpu" for pool in deployment.pools)
    if on_cpu and wanted <= set(cores) and total == len(wanted):
        return deployment, ()
    sizes = _sizes(deployment, len(cores))
    workers = sum(tp * replicas for tp, replicas in sizes.values())
    kv_bytes = KV_FRACTION * target.memory_bytes / workers
    pools, first = [], 0
    for pool in deployment.pools:
        tp, replicas = sizes[pool.role]
        taken = cores[first : first + tp * replicas]
        first += len(taken)
        pools.append(_on_cores(pool, tp, taken, kv_bytes))
    engine = replace(
        deployment.engine,
        kv_dtype=pools[0].dtype,
        block_size=max(CPU_BLOCK_SIZE, deployment.engine.block_size),
    )
    changed = replace(deployment, pools=tuple(pools), engine=engine)
    return changed, tuple(_changes(deployment, changed))


def _sizes(deployment: Deployment, num_cores: int) -> dict[str, tuple[int, int]]:
    if num_cores < len(deployment.pools):
        raise NegativeAnswer(f"{len(deployment.pools)} pools; this machine has {num_cores} core(s)")
    tp = {pool.role: pool.tp for pool in deployment.pools}
    replicas = {pool.role: pool.replicas for pool in deployment.pools}
    while sum(tp[role] * replicas[role] for role in tp) > num_cores:
        widest = max(tp, key=lambda role: tp[role])
        most = max(replicas, key=lambda role: replicas[role])
        if tp[widest] > 1:
            # The widest proper divisor, which still divides the heads.
            tp[widest] = next(n for n in range(tp[widest] // 2, 0, -1) if tp[widest] % n == 0)
        else:
            replicas[most] -= 1
    return {role: (tp[role], replicas[role]) for role in tp}


def _on_cores(pool: Pool, tp: int, cores: list[int], kv_bytes: float) -> Pool:
    return replace(
        pool,
        gpu="cpu",
        replicas=len(cores) // tp,
        spare_replicas=0,
        tp=tp,
        pp=1,
        ep=1,
        dp=1,
        dtype=pool.dtype if pool.dtype in DTYPES else "bf16",
        kv_bytes=min(pool.kv_bytes, float(int(kv_bytes))),
        placement=tuple(
            Placement(node=NODE, gpus=tuple(cores[start : start + tp]))
            for start in range(0, len(cores), tp)
        ),
    )


def _changes(planned: Deployment, changed: Deployment) -> Iterator[str]:
    """Yield each difference as `pools[decode].tp: 2 instead of 8`."""
    for before, after in zip(planned.pools, changed.pools, strict=True):
        yield from _differences(f"pools[{before.role}]", before, after, COMPARED)
    yield from _differences("engine", planned.engine, changed.engine, ("kv_dtype", "block_size"))
    yield "placement: cores of this machine instead of the planned devices"


def _differences(
    place: str, before: object, after: object, names: tuple[str, ...]
) -> Iterator[str]:
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield f"{place}.{name}: {_text(new)} instead of {_text(old)}"


def _text(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)
