"""This machine's GPUs in place of the plan's, one of which several engines may share."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from minicluster.errors import Fault, InputError
from serving.deployment.compile import devices, replica_places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minicluster.plan import Deployment
    from serving.cluster.state import State
    from serving.deployment.target import Target

GPUS = "MINICLUSTER_GPUS"
"""
Environment variable of `serving up`: this machine's GPU in place of the plan's GPU 0, 1 and so on,
separated by commas. A GPU that is named several times is shared by the engines of as many GPUs of
the plan: each takes the plan's `gpu_memory_utilization` of it.
"""


def read_gpus(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the GPUs that `GPUS` names; none: those of the plan. Raises InputError."""
    text = environment.get(GPUS, "")
    numbers = [number.strip() for number in text.split(",")] if text else []
    if not all(number.isdecimal() for number in numbers):
        expected = "numbers of GPUs, such as 0,0: the plan's GPUs 0 and 1 are this machine's GPU 0"
        raise InputError(GPUS, text, expected)
    return tuple(map(int, numbers))


def refuse_gpus(deployment: Deployment, gpus: Sequence[int], machine: Target) -> None:
    """
    Refuse GPUs in place of the plan's that its engines cannot have.

    Raises:
        InputError: the plan names a GPU that has none in its place; this machine does not have
            one; a replica would have one twice; or engines want more than the GPU they share.
    """
    text = ",".join(map(str, gpus))
    if machine.labels is not None:
        raise InputError(GPUS, text, "no GPUs in place of the plan's on the cluster of --address")
    if missing := sorted({gpu for gpu in gpus if gpu >= machine.num_gpus}):
        fault = Fault(f"names GPUs {missing}")
        raise InputError(GPUS, fault, f"of this machine's, which has {machine.num_gpus}")
    replicas = [
        [number for _, number in place]
        for pool in deployment.pools
        for place in replica_places(pool)
    ]
    if (last := max(map(max, replicas))) >= len(gpus):
        expected = f"one number for each of the plan's GPUs, of which the last is {last}"
        raise InputError(GPUS, text, expected)
    for numbers in replicas:
        if len({gpus[number] for number in numbers}) < len(numbers):
            expected = f"different GPUs for the plan's {numbers}, which are of one replica"
            raise InputError(GPUS, text, expected)
    _refuse_crowded(deployment, gpus)


def _refuse_crowded(deployment: Deployment, gpus: Sequence[int]) -> None:
    placed = {number for pool in deployment.pools for _, number in devices(pool)}
    sharers = max(Counter(gpus[number] for number in placed).values())
    share = deployment.engine.gpu_memory_utilization
    if sharers * share > 1:
        raise InputError(
            "engine.gpu_memory_utilization",
            share,
            f"at most {1 / sharers:.2g}: {sharers} GPUs of the plan are one by {GPUS}",
            "plan again with that share",
        )


def refuse_mapped(state: State, environment: Mapping[str, str], command: str) -> None:
    """Refuse a *command* whose new raylets would have the plan's GPUs; raises InputError."""
    if state.target == "gpu" and (text := environment.get(GPUS) or ",".join(map(str, state.gpus))):
        expected = f"no GPUs in place of the plan's with {command}"
        raise InputError(GPUS, text, expected, "`serving down`, then `serving up`")
