"""The read-only routes: models, health, readiness, metrics, the plan beside what runs, the page."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from minicluster.workload.engine_steps import EngineStep
from serving.api.gate import CONTENT_TYPE
from serving.protocol.messages import Refusal, RequestRefused, to_plain
from serving.request.validation import check_model

if TYPE_CHECKING:
    from starlette.requests import Request

    from serving.api.endpoint import Endpoint
    from serving.protocol.messages import EndpointConfig

HERE = Path(__file__).parent
PAGE = (HERE / "page.html").read_text(encoding="utf-8")
"""The page at `/`: one HTML file that loads nothing from other sites."""

SCHEMA = (HERE / "openapi.yaml").read_text(encoding="utf-8")
"""The OpenAPI schema, with places for the model and its longest answer."""


def _hashes(tag: str) -> str:
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Only the file's own script runs on the page: text of a model is never code."""


class StatusRoutes:
    """The routes that generate nothing; health, readiness, schema and page need no key."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._gate = endpoint.gate
        self._access = endpoint.access
        self._config = config = endpoint.config
        self._planned = _planned(config)
        self._schema = _schema(config, needs_key=bool(self._access.keys.current()))
        card = {
            "object": "model",
            "created": int(time.time()),
            "owned_by": "minicluster",
            "max_model_len": config.max_model_len,
        }
        parent = {"parent": config.model_id}
        self._cards = {config.model_id: {"id": config.model_id, **card}} | {
            name: {"id": name, **card, **parent} for name in config.adapters
        }

    async def models(self, request: Request) -> Response:
        """List the model, and its adapters."""
        self._access.client(request)
        return JSONResponse({"object": "list", "data": [*self._cards.values()]})

    async def model(self, request: Request) -> Response:
        """Describe the model, or an adapter."""
        self._access.client(request)
        check_model(request.path_params["model"], self._config.models)
        return JSONResponse(self._cards[request.path_params["model"]])

    async def health(self, _request: Request) -> Response:
        """Answer OK: this process is alive; `/ready` reports whether requests get through."""
        return PlainTextResponse("OK")

    async def ready(self, request: Request) -> Response:
        """
        Report whether requests get through; 503 and the reasons if not.

        One domain that answers is enough, so that a load balancer does not turn a partial outage
        into a total one; with `?all=1` every domain has to.
        """
        ready, lacking = await self._gate.ready()
        if request.query_params.get("all") == "1":
            ready = not lacking
        return JSONResponse({"ready": ready, "lacking": lacking}, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus's text format."""
        self._access.client(request)
        return PlainTextResponse(await self._gate.metrics_text(), media_type=CONTENT_TYPE)

    async def plan(self, request: Request) -> Response:
        """Return the plan, what is deployed, and what is measured."""
        self._access.client(request)
        return JSONResponse({"planned": self._planned, **await self._gate.state()})

    async def engine_steps(self, request: Request) -> Response:
        """
        Return the steps of one engine of each role in an interval of Unix time, as `EngineStep`s.

        A load test sees by them how fast the engines were; simulated ones report none.
        """
        self._access.client(request)
        begin_s, end_s = (_seconds(request, name) for name in ("begin", "end"))
        steps = await self._gate.steps(begin_s, end_s)
        return JSONResponse({"columns": EngineStep._fields, "steps": steps})

    async def schema(self, _request: Request) -> Response:
        """Return the OpenAPI schema."""
        return JSONResponse(self._schema)

    async def page(self, _request: Request) -> Response:
        """Return the live page; it asks for a key itself if one is needed."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)


def _seconds(request: Request, name: str) -> float:
    text = request.query_params.get(name, "")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        message = f"{name}: got {text!r}; expected seconds of Unix time, such as 1795880000.5"
        raise RequestRefused(Refusal(status=400, message=message, param=name, code="invalid_value"))
    return seconds


def _schema(config: EndpointConfig, *, needs_key: bool) -> dict[str, Any]:
    longest = str(config.max_model_len - 1)
    text = SCHEMA.replace("LONGEST", longest).replace("MODEL_ID", json.dumps(config.model_id))
    text = text.replace("MODELS", json.dumps(config.models))
    schema: dict[str, Any] = yaml.safe_load(text)
    del schema["x-responses"]  # anchors only
    return schema | ({"security": [{"key": []}]} if needs_key else {})


def _planned(config: EndpointConfig) -> dict[str, Any]:
    """Return the plan for people: without step times, and routing among the other settings."""
    plain = to_plain(config)
    routing: dict[str, Any] = plain.pop("routing")
    del plain["step_model"]
    return plain | routing
