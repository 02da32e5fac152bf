"""What `serve deploy` and KubeRay ask for by import: a plan, checked and compiled where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from serving.compile import compile_app, ray_nodes
from serving.engine import Ground
from serving.target import located, this_machine
from serving.validate import findings, refuse, ruled_out
from sizing.plan import read_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.served import ServedApp


def imported(args: Mapping[str, str]) -> ServedApp:
    """
    Compile a plan for hosts of its own, by the checks of `serving up`.

    Args:
        args: `plan`, the file; `target`, `cpu` or `gpu`; `model`, where it is on every host.

    Raises:
        InputError: as `read_plan`.
        NegativeAnswer: the plan cannot be realised; every reason in a line.
    """
    plan, kind = read_plan(Path(args["plan"])), args["target"]
    deployment = located(plan.deployment, args.get("model"))
    # Serve waits for nodes that are still to come: the plan's are taken to be there.
    nodes = tuple(node.labels for node in ray_nodes(deployment, kind))
    refuse([*ruled_out(plan, kind), *findings(deployment, this_machine(kind, nodes))])
    return compile_app(deployment, Ground(target=kind, one_host=False), plan=plan)
