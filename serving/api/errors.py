"""Errors as clients see them: OpenAI's shape, a request id, and no internals."""

from __future__ import annotations

import logging
import random
import re
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from serving.protocol.messages import RETRY_SPREAD, Refusal, RequestRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The request ids of clients that are kept; others could forge lines of a log."""


def request_id_of(request: Request) -> str:
    """Return the id of a request: the client's, if it is safe in a log, or a new one."""
    sent = request.headers.get(REQUEST_ID, "")
    return sent if SAFE_REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"


def error_response(refusal: Refusal, headers: Mapping[str, str]) -> Response:
    """Answer a refusal, with *headers* besides its own; when to retry differs from call to call."""
    later = refusal
    if refusal.retry_after_s is not None:
        factor = random.uniform(1 - RETRY_SPREAD, 1 + RETRY_SPREAD)  # noqa: S311  (no secret)
        later = replace(refusal, retry_after_s=factor * refusal.retry_after_s)
    return JSONResponse(
        refusal.body, status_code=refusal.status, headers={**later.headers, **headers}
    )


def refusal_of(error: Exception, request_id: str) -> Refusal:
    """
    Turn any exception into the client's error.

    Args:
        error: what was raised.
        request_id: names the request in the log.
    """
    if isinstance(error, RequestRefused):
        return error.refusal
    if isinstance(error, HTTPException):
        return Refusal(status=error.status_code, message=str(error.detail))
    logger.error("request %s failed", request_id, exc_info=error)
    return Refusal(status=500, message=f"The server failed to answer; its log names {request_id}.")


def with_param(refusal: Refusal, body: Mapping[str, object]) -> Refusal:
    """Name the parameter at fault where the engine's message does and its error object does not."""
    if refusal.param is not None or refusal.status >= 500:  # noqa: PLR2004
        return refusal
    message = refusal.message.lower()
    for name in sorted(body, key=len, reverse=True):
        if len(name) > 1 and (name in message or name.replace("_", " ") in message):
            return replace(refusal, param=name)
    return refusal
