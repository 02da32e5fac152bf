"""What `serve deploy` and KubeRay ask for by import: a plan, checked and compiled where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.plan import read_plan
from serving.api.api_keys import KEYS, KEYS_FILE
from serving.deployment.compile import compile_app, ray_nodes
from serving.deployment.engine_args import DeployTarget
from serving.deployment.feasibility import findings, refuse, ruled_out
from serving.deployment.target import located, this_machine
from serving.request.token_limit import read_token_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.protocol.app_spec import ServedApp

OPEN = "open"
"""Access without a key."""


def imported(args: Mapping[str, str], environment: Mapping[str, str]) -> ServedApp:
    """
    Compile a plan for hosts of its own, by the checks of `serving up`.

    Args:
        args: `plan`, the file; `target`, `cpu` or `gpu`; `model`, where it is on every host;
            `access`, `open` if everybody may use the endpoint, without a key.
        environment: names keys and the longest answer (`serving.api.api_keys`,
            `serving.request.token_limit`).

    Raises:
        InputError: there are no API keys, and access is not open; or as `read_plan`.
        NegativeAnswer: the plan cannot be realised; every reason in a line.
    """
    if args.get("access") != OPEN and not {KEYS, KEYS_FILE} & environment.keys():
        # The file itself is on the head alone; this may run elsewhere.
        expected = f"{KEYS_FILE}, a file of API keys"
        way_out = "or args.access: open, to let everybody in"
        raise InputError("runtime_env.env_vars", None, expected, way_out)
    plan, kind = read_plan(Path(args["plan"])), args["target"]
    deployment = located(plan.deployment, args.get("model"))
    # Serve waits for nodes that are still to come: the plan's are taken to be there.
    nodes = tuple(node.labels for node in ray_nodes(deployment, kind))
    refuse([*ruled_out(plan, kind), *findings(deployment, this_machine(kind, nodes))])
    ground = DeployTarget(target=kind, one_host=False, token_limit=read_token_limit(environment))
    return compile_app(deployment, ground, plan=plan)
