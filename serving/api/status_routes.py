"""What can be seen through the front door: models, health, metrics, the plan beside the facts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from serving.api.live_page import PAGE, PAGE_HEADERS
from serving.api.metrics import CONTENT_TYPE
from serving.api.openapi import openapi
from serving.protocol.endpoint_config import to_plain
from serving.request.validation import check_model

if TYPE_CHECKING:
    from starlette.requests import Request

    from serving.api.completions import CompletionRoutes


class StatusRoutes:
    """Answers everything that asks for no tokens; health and the empty page need no key."""

    def __init__(self, door: CompletionRoutes) -> None:
        """Look out of *door*."""
        self._door = door
        front = door.front
        self._planned = {
            name: value for name, value in to_plain(front).items() if name != "step_model"
        }
        self._schema = openapi(front, locked=door.entrance.locked)
        self._card = {
            "id": front.model_id,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "minicluster",
            "max_model_len": front.max_model_len,
        }

    async def models(self, request: Request, _at: str) -> Response:
        """List the one model."""
        self._door.entrance.key(request)
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request, _at: str) -> Response:
        """Describe the model."""
        self._door.entrance.key(request)
        check_model(request.path_params["model"], self._door.front.model_id)
        return JSONResponse(self._card)

    async def health(self, _request: Request, _at: str) -> Response:
        """Say that this process answers; whether requests get through, `/ready` says."""
        return PlainTextResponse("OK")

    async def ready(self, _request: Request, _at: str) -> Response:
        """Say whether requests get through; 503 and what is lacking if not."""
        lacking = await self._door.ready.lacking()
        return JSONResponse(
            {"ready": not lacking, "lacking": lacking}, status_code=503 if lacking else 200
        )

    async def metrics(self, request: Request, _at: str) -> Response:
        """Return what Prometheus scrapes."""
        door = self._door
        door.entrance.key(request)
        await door.ready.running()
        return PlainTextResponse(door.metrics.text(door.guard), media_type=CONTENT_TYPE)

    async def plan(self, request: Request, _at: str) -> Response:
        """Return what was planned, what is deployed, and what is measured."""
        door = self._door
        door.entrance.key(request)
        running = await door.ready.running()
        pools: dict[str, dict[str, dict[str, int]]] = {}
        for pool in door.front.pools:
            for domain, planned in pool.replicas.items():
                up = running.get((pool.role, domain), 0)
                pools.setdefault(pool.role, {})[domain] = {"planned": planned, "running": up}
        engines: dict[str, dict[str, Any]] = {}
        for (role, domain), facts in (await door.ready.facts()).items():
            engines.setdefault(role, {})[domain] = facts
        state, margin = door.guard.state, door.guard.margin
        measured: dict[str, Any] = {
            **door.measured.summary(),
            "outstanding": {"prefill": state.waiting, "all": state.sequences},
            "margin": {"ttft_s": margin.ttft_s, "tpot_s": margin.tpot_s},
        }
        limit = door.entrance.token_limit
        deployed = {
            "replicas": pools,
            "engines": engines,
            "max_output_tokens": limit,
            "guard": door.guard.sheds,
        }
        return JSONResponse({"planned": self._planned, "deployed": deployed, "measured": measured})

    async def schema(self, _request: Request, _at: str) -> Response:
        """Return the OpenAPI schema."""
        return JSONResponse(self._schema)

    async def page(self, _request: Request, _at: str) -> Response:
        """Return the live page; it asks for a key itself if one is needed."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)
