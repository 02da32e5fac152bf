"""The OpenAPI schema of the endpoint: what clients may send, and what they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.protocol.endpoint_config import EndpointConfig

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NULLABLE_TEXT: Schema = {"type": ["string", "null"]}


def openapi(front: EndpointConfig, *, locked: bool) -> Schema:
    """
    Describe the endpoint of a plan; *locked*: whether it wants an API key.

    Parameters that are not listed are passed on to the engine, which ignores those it does not
    know.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "minicluster", "version": "1"},
        "paths": {
            "/v1/completions": _asking("completions", _completion(front), locked=locked),
            "/v1/chat/completions": _asking("chat", _chat(front), locked=locked),
            "/v1/models": _looking("models", {"$ref": "#/components/schemas/Models"}),
            "/v1/models/{model}": _model(front),
            "/health": _looking("health", None),
            "/ready": _looking("ready", {"$ref": "#/components/schemas/Ready"}, also="503"),
            "/metrics": _looking("metrics", None),
            "/plan": _looking("plan", {"type": "object", "required": ["planned", "measured"]}),
        },
        "components": {
            "schemas": _answers(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        **({"security": [{"key": []}]} if locked else {}),
    }


def _asking(name: str, body: Schema, *, locked: bool) -> Schema:
    """Describe a path that generates."""
    errors = ["400", "403", "404", "413", "429", "500", "503", "504", *(["401"] if locked else [])]
    answer = {"$ref": "#/components/schemas/Answer"}
    content = {
        "application/json": {"schema": answer},
        "text/event-stream": {"schema": {}},
    }
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "The answer, or its events.", "content": content},
                **{status: _error() for status in errors},
            },
        }
    }


def _looking(name: str, schema: Schema | None, *, also: str | None = None) -> Schema:
    """Describe a path that is only looked at."""
    content = {} if schema is None else {"content": {"application/json": {"schema": schema}}}
    return {
        "get": {
            "operationId": name,
            "responses": {
                "200": {"description": "What there is.", **content},
                **({also: {"description": "Not now.", **content}} if also else {}),
                **{status: _error() for status in ("401", "403")},
            },
        }
    }


def _model(front: EndpointConfig) -> Schema:
    """Describe the path of one model."""
    path = _looking("model", {"$ref": "#/components/schemas/Model"})
    name = {"type": "string", "examples": [front.model_id], "minLength": 1}
    path["get"]["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": name}]
    path["get"]["responses"]["404"] = _error()
    return path


def _error() -> Schema:
    """Describe a refusal."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": "Refused; the message says why.", "content": content}


def _sampling(front: EndpointConfig) -> Schema:
    """Return the parameters that completions and chats share."""
    longest = front.max_model_len - 1
    tokens = {"type": ["integer", "null"], "minimum": 1, "maximum": longest}
    return {
        "model": {"const": front.model_id},
        "max_tokens": tokens,
        "min_tokens": {"type": "integer", "minimum": 0, "maximum": 1},
        "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
        "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 1, "maximum": 1000},
        "n": {"type": "integer", "minimum": 1, "maximum": 4},
        "seed": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**31},
        "stop": {
            "anyOf": [
                {"type": "null"},
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
            ]
        },
        "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
        "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
        "ignore_eos": FLAG,
        "stream": FLAG,
        "user": TEXT,
    }


def _completion(front: EndpointConfig) -> Schema:
    """Describe the body of a completion."""
    ids = {"type": "array", "items": COUNT, "minItems": 1, "maxItems": front.max_model_len - 1}
    text = {"type": "string", "minLength": 1}
    prompts = [{"type": "array", "items": each, "minItems": 1, "maxItems": 4} for each in (text,)]
    properties = {
        **_sampling(front),
        "prompt": {"anyOf": [text, ids, *prompts]},
        "echo": FLAG,
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    }
    return {"type": "object", "required": ["prompt"], "properties": properties}


def _chat(front: EndpointConfig) -> Schema:
    """Describe the body of a chat."""
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
    }
    properties = {
        **_sampling(front),
        "messages": {"type": "array", "items": message, "minItems": 1},
        "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1},
    }
    return {"type": "object", "required": ["messages"], "properties": properties}


def _answers() -> Schema:
    """Describe what comes back."""
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "additionalProperties": False,
        "properties": {
            "message": {"type": "string", "minLength": 1},
            "type": TEXT,
            "param": NULLABLE_TEXT,
            "code": NULLABLE_TEXT,
        },
    }
    model = {
        "type": "object",
        "required": ["id", "object", "created", "owned_by", "max_model_len"],
        "properties": {"id": TEXT, "object": {"const": "model"}, "max_model_len": COUNT},
    }
    usage = {
        "type": "object",
        "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
        "properties": {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    }
    return {
        "Error": {"type": "object", "required": ["error"], "properties": {"error": error}},
        "Model": model,
        "Models": {
            "type": "object",
            "required": ["object", "data"],
            "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": model}},
        },
        "Answer": {
            "type": "object",
            "required": ["id", "object", "created", "model", "choices", "usage"],
            "properties": {"choices": {"type": "array", "minItems": 1}, "usage": usage},
        },
        "Ready": {
            "type": "object",
            "required": ["ready", "lacking"],
            "properties": {"ready": FLAG, "lacking": {"type": "array", "items": TEXT}},
        },
    }
