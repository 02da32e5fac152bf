"""
The command `serving`, whose `up` lets tests spoil KV transfers and wait less for leases.

It mixes `spoiler.Spoiler` into decode's workers, which does nothing until it is told to. With
`CROWDED` in the environment it does not refuse more replicas than the machine has cores.
"""

from __future__ import annotations

import os
from pathlib import Path

from serving.cli import main
from serving.deployment import compile as compilation
from serving.deployment import engine_args
from serving.operations import deploy as operations

CROWDED = "MINICLUSTER_TEST_CROWDED"

LEASE_S = 10
"""How long prefill keeps what is not fetched; decode renews it every sixth of that."""


def spoil() -> None:
    """Change what `serving up` hands to the engines."""
    os.environ["PYTHONPATH"] = os.pathsep.join(  # where workers find the spoiler
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    engine_args.LEASE_S["shared memory"] = LEASE_S
    if CROWDED in os.environ:
        operations.findings = lambda _deployment, _target: ()
    planned = compilation.engine_kwargs
    extension = {"worker_extension_cls": "spoiler.Spoiler"}
    compilation.engine_kwargs = lambda deployment, pool, target: (
        planned(deployment, pool, target) | (extension if pool.role == "decode" else {})
    )


if __name__ == "__main__":
    spoil()
    main()
