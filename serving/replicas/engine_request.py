"""Conversion of requests and errors to and from vLLM's classes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.exceptions import VLLMClientError

from serving.protocol.messages import Refusal
from serving.request.validation import engine_request_id

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMAS = {"chat": ChatCompletionRequest, "completions": CompletionRequest}
ERROR_EVENT = 'data: {"error"'
"""The start of the event with which a stream of vLLM fails; [DONE] follows nevertheless."""

SERVER_ERROR = 500
GRAMMAR = re.compile(r"grammar|structural tag|schema|regex|choices", re.IGNORECASE)
"""Words of the error messages of vLLM's grammar compilers."""

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters with which NIXL's connector keeps the KV cache of a prompt for another engine."""


def engine_request(kind: str, body: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return vLLM's request of *kind* (`chat` or `completions`), or the refusal of the body."""
    try:
        request = SCHEMAS[kind].model_validate({**body, "request_id": engine_request_id(body)})
        _read_content(getattr(request, "messages", ()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # What `_read_content` reads, and vLLM's own check of calls, begins with a place in a list.
        within = ("messages",) if isinstance(next(iter(first["loc"]), None), int) else ()
        param = ".".join(str(part) for part in (*within, *first["loc"]))
        message = f"{param}: {first['msg']}" if param else first["msg"]
        return Refusal(status=400, message=message, param=param or None)
    except VLLMClientError as error:  # from vLLM's own checks, which pydantic lets through
        return Refusal(status=400, message=str(error), param=getattr(error, "parameter", None))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        # Its checks look at values before their types have been checked.
        return Refusal(status=400, message=f"The body is malformed: {error}")
    return request


def _read_content(messages: Iterable[Any]) -> None:
    """
    Check content now that pydantic would check only when it is read.

    Pydantic accepts any other content as an iterable of parts and checks each when it is read,
    which is possible only once.
    """
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str | list | None):
            message["content"] = list(content)


def for_prefill(request: Any, *, keep: bool) -> Any:  # noqa: ANN401
    """
    Return *request* for prefill: its prompt, with an answer of one token that is discarded.

    With *keep* the engine keeps the KV cache until another one fetches it.
    """
    changes: dict[str, Any] = {
        "kv_transfer_params": dict(REMOTE_DECODE) if keep else None,
        "max_tokens": 1,
        "min_tokens": 0,
        "temperature": 0.0,
        "stream": False,
        "stream_options": None,
        "logprobs": None,
        "response_format": None,
        "structured_outputs": None,
    }
    if isinstance(request, ChatCompletionRequest):
        changes |= {"max_completion_tokens": 1, "logprobs": False, "top_logprobs": None}
    return request.model_copy(update=changes)


def refusal_in(item: Any) -> Refusal | None:  # noqa: ANN401
    """
    Return the refusal that an event or an answer of the engine is; `None`: it is none.

    The client's errors keep their message, and that of internal ones is hidden.
    """
    if isinstance(item, str):
        if not item.startswith(ERROR_EVENT):
            return None
        error = json.loads(item.removeprefix("data: "))["error"]
    elif hasattr(item, "usage"):
        return None
    else:
        error = vars(item.error)
    code = error.get("code")
    status = code if isinstance(code, int) and code else SERVER_ERROR
    message, param = str(error.get("message")), error.get("param")
    if status >= SERVER_ERROR:
        return Refusal(status=status, message="The engine failed while answering.")
    if param is None and GRAMMAR.search(message):
        # vLLM's grammar compiler does not know the request, and so names no parameter.
        param = "structured_outputs"
        message = f"structured_outputs or response_format: {message}"
    return Refusal(status=status, message=message, param=param)
