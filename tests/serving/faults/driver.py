"""
Asks a deployment under test for its insides, from a process of its own: no Ray inside pytest.

It answers a JSON array `[what, argument …]` a line, with JSON a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

POOLS = {"prefill": "Prefill:demo", "decode": "Decode:demo"}
PREFILL, DECODE = POOLS.values()


class Driver:
    """What can be asked."""

    def spoil(self, how: str) -> str:
        """Have transfers arrive otherwise from now on: see `spoiler`."""
        call = _handle(DECODE).collective_rpc.remote("spoil", kwargs={"how": how})
        return str(call.result(timeout_s=60))

    def running(self) -> dict[str, int]:
        from ray import serve  # noqa: PLC0415

        from serving.protocol.app_spec import APP  # noqa: PLC0415

        deployments = serve.status().applications[APP].deployments
        return {
            name: each.replica_states.get("RUNNING", 0) if each.status == "HEALTHY" else 0
            for name, each in deployments.items()
        }

    def held(self) -> int:
        """Return of how many replicas some request still holds KV cache."""
        return [free for name in POOLS.values() for free in _all(name, "kv_is_free")].count(False)

    def pairs(self, prefills: int) -> int:
        """Run a prompt over every pair of replicas; return how many pairs answered."""
        prompts = [[2500 + at] * 20 for at in range(prefills)]
        answers = _all(DECODE, "probe", prompts, [_handle(PREFILL)])
        return len(
            {(phases.prefill_replica, phases.decode_replica) for each in answers for phases in each}
        )

    def inside(self) -> dict[str, list[dict[str, Any]]]:
        """Return what each simulated engine has inside, by role."""
        return {role: _all(name, "inside") for role, name in POOLS.items()}

    def fault(self, role: str, kind: str, value: float, replicas: list[str]) -> None:
        """Let something go wrong in some simulated replicas, by their names."""
        _all(POOLS[role], "fault", kind, value, replicas=replicas)

    def answer(
        self, kind: str, body: dict[str, Any], deadline_s: float, routing: dict[str, Any]
    ) -> list[Any]:
        """Ask the pools as the endpoint does, with both deadlines and the routing of the test."""
        from minicluster.plan import Routing, read_deployment  # noqa: PLC0415
        from serving.cluster.state import DEPLOYMENT  # noqa: PLC0415
        from serving.cluster.token import channel_tls  # noqa: PLC0415
        from serving.deployment.compile import domains, endpoint_config  # noqa: PLC0415
        from serving.protocol.messages import Refusal  # noqa: PLC0415
        from serving.replicas.backend import ReplicaBackend  # noqa: PLC0415
        from serving.replicas.seats import ReplicaSeats  # noqa: PLC0415

        deployment = read_deployment(DEPLOYMENT)
        config = replace(
            endpoint_config(
                deployment,
                domains=domains(deployment, None),
                ongoing=dict.fromkeys(POOLS, 100),
                deadlines_s=(deadline_s, deadline_s),
            ),
            routing=Routing(**routing),
        )
        [domain] = config.pairing
        handles = {(role, domain): _handle(name) for role, name in POOLS.items()}
        tls = channel_tls(os.environ, listens=False)

        async def answered() -> list[Any]:
            seats = ReplicaSeats(config, handles, tls)
            try:
                backend = ReplicaBackend(config, seats)
                await backend.running()  # all pools are known
                begun = await backend.answer(domain, kind, {"model": "demo", **body})
                if isinstance(begun, Refusal):
                    return [asdict(begun)]
                said = [asdict(begun.chunk.phases), begun.chunk.first]
                if isinstance(begun.chunk.first, str):
                    reader = Collected()
                    begun.forward(reader)
                    said += await reader.whole()
                return said
            finally:
                seats.close()

        return asyncio.run(answered())


class Collected:
    """The events of an answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def events(self, text: bytes) -> None:
        self._texts.append(text.decode())

    def ended(self, end: Any) -> None:  # noqa: ANN401
        self._end.set_result(end)

    async def whole(self) -> list[str]:
        """Return all events, when the last one has come; raises what broke them off."""
        end = await self._end
        if end.error is not None:
            raise end.error
        return [*self._texts, end.text]


def _handle(name: str) -> Any:  # noqa: ANN401
    from ray import serve  # noqa: PLC0415

    from serving.protocol.app_spec import APP  # noqa: PLC0415

    handle = serve.get_deployment_handle(name, APP)
    handle.facts.remote().result(timeout_s=60)
    return handle


def _all(name: str, method: str, *given: Any, **named: Any) -> list[Any]:  # noqa: ANN401
    """Return what every replica of a pool answers."""
    from ray.llm._internal.serve.utils.broadcast import broadcast  # noqa: PLC0415

    answers: list[Any] = broadcast(_handle(name), method, given, named)
    return answers


def operate() -> None:
    from serving.cluster.connection import connected  # noqa: PLC0415
    from serving.operations.status import current  # noqa: PLC0415

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
    operate()
