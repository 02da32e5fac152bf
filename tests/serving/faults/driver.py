"""
Drives a deployment under test, from a process of its own: no Ray starts inside pytest.

`driver.py up DEPLOYMENT --port PORT` deploys, with more replicas than this machine has cores if
need be, with short deadlines, and with `spoiler.Spoiler` mixed into decode's workers.
`driver.py` alone answers a JSON array `[what, argument …]` a line, with JSON a line.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 8.0
"""Of prefill, and of the hand-off: engines that share a core need seconds under load."""

LEASE_S = 6
"""How long prefill keeps what nobody fetches, so that tests need not wait for 30 s."""

PREFILL, DECODE = "Prefill:demo", "Decode:demo"


def up(deployment: Path, port: int) -> None:
    """Deploy; returns when ready."""
    from serving.compile import compile_app  # noqa: PLC0415
    from serving.deploy import Site, deploy  # noqa: PLC0415
    from serving.engine import Ground  # noqa: PLC0415
    from serving.ports import free_nixl_port  # noqa: PLC0415
    from sizing.plan import read_deployment, to_json  # noqa: PLC0415

    os.environ["PYTHONPATH"] = os.pathsep.join(  # where workers find the spoiler
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    planned = read_deployment(deployment)
    ground = Ground(
        target="cpu",
        nixl_port=free_nixl_port(max(pool.gpus for pool in planned.pools)),
        decode_engine_kwargs={"worker_extension_cls": "spoiler.Spoiler"},
    )
    served = compile_app(planned, ground)
    for pool in served.pools:
        transfer = pool.llm_config["engine_kwargs"]["kv_transfer_config"]
        transfer["kv_connector_extra_config"]["kv_lease_duration"] = LEASE_S
    front = replace(served.front, prefill_deadline_s=DEADLINE_S, kv_wait_deadline_s=DEADLINE_S)
    deploy(
        replace(served, front=front),
        Site(target="cpu", host="127.0.0.1", port=port),
        deployment=planned,
        plan=to_json(planned),
        told=lambda text: sys.stderr.write(f"{text}\n"),
    )


class Driver:
    """What can be asked."""

    def spoil(self, how: str) -> str:
        """Have transfers arrive otherwise from now on: see `spoiler`."""
        call = _handle(DECODE).collective_rpc.remote("spoil", kwargs={"how": how})
        return str(call.result(timeout_s=60))

    def running(self) -> dict[str, int]:
        """Return how many replicas run, by deployment."""
        from ray import serve  # noqa: PLC0415

        from serving.served import APP  # noqa: PLC0415

        deployments = serve.status().applications[APP].deployments
        return {
            name: each.replica_states.get("RUNNING", 0) if each.status == "HEALTHY" else 0
            for name, each in deployments.items()
        }

    def held(self) -> int:
        """Return of how many replicas some request still holds KV cache."""
        from serving.ray_compat import broadcast  # noqa: PLC0415

        handles = [_handle(name) for name in (PREFILL, DECODE)]
        return [free for each in handles for free in broadcast(each, "kv_is_free")].count(False)

    def answer(self, kind: str, body: dict[str, Any], order: dict[str, Any]) -> list[Any]:
        """Ask decode itself, with an order of the test's."""
        from serving.order import Order  # noqa: PLC0415
        from serving.requests import Refusal  # noqa: PLC0415

        handle = _handle(DECODE).options(stream=True)
        begun, *later = handle.answer.remote(kind, {"model": "demo", **body}, order=Order(**order))
        if isinstance(begun, Refusal):
            return [asdict(begun)]
        return [asdict(begun.phases), begun.first, *later]


def _handle(name: str) -> Any:  # noqa: ANN401
    """Return a handle that knows its replicas."""
    from ray import serve  # noqa: PLC0415

    from serving.served import APP  # noqa: PLC0415

    handle = serve.get_deployment_handle(name, APP)
    handle.facts.remote().result(timeout_s=60)
    return handle


def operate() -> None:
    """Answer what is asked until nobody asks."""
    from serving.connection import connected  # noqa: PLC0415
    from serving.status import current  # noqa: PLC0415

    answers, sys.stdout = sys.stdout, sys.stderr  # libraries talk on stdout
    asked = Driver()
    with connected(current().address):
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            try:
                method: Callable[..., Any] = getattr(asked, what)
                said = {"result": method(*arguments)}
            except Exception as error:  # noqa: BLE001  (the test decides what it means)
                said = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(said) + "\n")
            answers.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["up"]:
        up(Path(sys.argv[2]), int(sys.argv[4]))
    else:
        operate()
