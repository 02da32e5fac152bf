"""Replicas beyond those that the SLO needs, for failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicluster.errors import InputError
from sizing.network.spares import replica_spares

if TYPE_CHECKING:
    from minicluster.plan import Inputs
    from sizing.planner.candidate import Candidate


def spare_replicas(inputs: Inputs, chosen: Candidate) -> dict[str, int]:
    """
    Return the k of each pool's N + k replicas.

        A_pool = A^(1/pools): all pools together reach A      (docs/model.md, eq. U4)

    Args:
        inputs: `search.spare_replicas`, or `search.availability_fraction` and the cluster's
            failures.
        chosen: replicas that the SLO needs; any GPU of one takes it down.

    Raises:
        InputError: an availability, and a cluster whose failures nobody says.

    Ignores:
        Requests that were on a failed replica, failures that take several replicas.

    """
    asked, shapes = inputs.scenario.search, chosen.layout.shapes
    target = asked.availability_fraction
    if target is None:
        return dict.fromkeys(shapes, asked.spare_replicas)
    failures = inputs.cluster.failures
    if failures is None:
        raise InputError(
            "search.availability_fraction",
            target,
            f"failures beside it: cluster {inputs.cluster.name} says nothing of them",
            "cluster.gpu_mtbf_s and cluster.repair_s, or a preset with [failures]",
        )
    return {
        role: replica_spares(
            chosen.replicas[role],
            shape.gpus,
            gpu_mtbf_s=failures.gpu_mtbf_s,
            repair_s=failures.node_repair_s,
            availability=target ** (1 / len(shapes)),
        ).spares
        for role, shape in shapes.items()
    }
