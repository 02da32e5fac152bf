"""
The OpenAI-compatible endpoint.

Not Ray's `OpenAiIngress`: that one imports the engine (8 s of start, 0.6 GB), batches, hides
errors in 500s and lets clients forge KV transfers; see docs/adr/0102.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from ray import serve
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException

from serving.front import front_from
from serving.phases import Phases
from serving.requests import Refusal, Refused, check, parse_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

logger = logging.getLogger(__name__)
http = FastAPI(title="minicluster", docs_url=None, redoc_url=None, openapi_url=None)


async def _events(first: list[str], items: AsyncIterator[list[str]]) -> AsyncIterator[str]:
    """Pass on server-sent events; if the engine fails midway, say so and end without [DONE]."""
    yield "".join(first)
    try:
        async for later in items:
            yield "".join(later)
    except Exception:
        logger.exception("a stream broke off")
        broken = Refusal(status=500, message="The engine failed while answering.")
        yield f"data: {json.dumps(broken.body)}\n\n"


@http.exception_handler(Refused)
async def _on_refusal(_request: Request, refused: Refused) -> Response:
    """Answer a refusal."""
    return JSONResponse(refused.refusal.body, status_code=refused.refusal.status)


@http.exception_handler(HTTPException)
async def _on_http(_request: Request, error: HTTPException) -> Response:
    """Answer what the framework refuses: unknown path, wrong method."""
    refusal = Refusal(status=error.status_code, message=str(error.detail))
    return JSONResponse(refusal.body, status_code=error.status_code, headers=error.headers)


@http.exception_handler(BackPressureError)
@http.exception_handler(DeploymentUnavailableError)
async def _on_unavailable(_request: Request, _error: Exception) -> Response:
    """Answer where no replica can."""
    refusal = Refusal(status=503, message="No replica can take the request; try again later.")
    return JSONResponse(refusal.body, status_code=503)


@http.exception_handler(Exception)
async def _on_failure(_request: Request, error: Exception) -> Response:
    """Answer everything else without showing our insides."""
    logger.error("a request failed", exc_info=error)
    refusal = Refusal(status=500, message="The server failed to answer; its log says why.")
    return JSONResponse(refusal.body, status_code=500)


# Last: `serve.ingress` copies the routes, and what they call must be there by then.
@serve.ingress(http)
class Ingress:
    """Checks requests, sends them to decode, and says in `Server-Timing` where the time went."""

    def __init__(
        self, front: dict[str, Any], *, servers: dict[str, Any], prefill: dict[str, Any]
    ) -> None:
        """Keep what the plan says and handles of both pools: see `serving.front`."""
        self._front = front_from(front)
        self._model_id = model_id = self._front.model_id
        self._max_model_len = max_model_len = self._front.max_model_len
        self._prefill: Any = next(iter(prefill.values()), None)
        self._decode = next(iter(servers.values())).options(stream=True)
        self._card = {
            "id": model_id,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "minicluster",
            "max_model_len": max_model_len,
        }

    @http.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        """Complete a prompt."""
        return await self._answer("completions", request)

    @http.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """Continue a chat."""
        return await self._answer("chat", request)

    @http.get("/v1/models")
    async def models(self) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._card]})

    @http.get("/v1/models/{model:path}")
    async def model(self, model: str) -> Response:
        """Describe the model."""
        check({"model": model}, model_id=self._model_id, max_model_len=self._max_model_len)
        return JSONResponse(self._card)

    @http.get("/health")
    async def health(self) -> Response:
        """Say whether the endpoint and both pools have all their replicas."""
        status = await asyncio.to_thread(serve.status)
        for app in status.applications.values():
            for name, deployment in app.deployments.items():
                if deployment.status != "HEALTHY":
                    message = f"{name} is {deployment.status}."
                    raise Refused(Refusal(status=503, message=message))
        return PlainTextResponse("OK")

    @http.post("/internal/prefill")
    async def time_prefill(self, request: Request) -> Response:
        """Run a completion's prompt through the prefill pool alone; `PrefillTiming` as JSON."""
        timing = await self._prefill.time_prefill.remote(await self._read(request))
        if isinstance(timing, Refusal):
            raise Refused(timing)
        return JSONResponse(asdict(timing))

    async def _read(self, request: Request) -> dict[str, Any]:
        """Read and check a request."""
        return check(
            parse_body(await request.body()),
            model_id=self._model_id,
            max_model_len=self._max_model_len,
        )

    async def _answer(self, kind: str, request: Request) -> Response:
        """Answer with JSON, or with events as they come."""
        items = aiter(self._decode.answer.remote(kind, await self._read(request)))
        phases = await anext(items)
        if not isinstance(phases, Phases):
            raise Refused(phases)
        headers = {"Server-Timing": phases.server_timing}
        first = await anext(items)
        if isinstance(first, dict):
            return JSONResponse(first, headers=headers)
        events = _events(first, items)
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")
