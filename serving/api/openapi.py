"""The OpenAPI schema of the endpoint: requests and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.protocol.endpoint_config import EndpointConfig

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NULLABLE_TEXT: Schema = {"type": ["string", "null"]}


def openapi(config: EndpointConfig, *, needs_key: bool) -> Schema:
    """
    Return the schema of the endpoint of a plan; *needs_key*: whether it needs an API key.

    Other parameters are passed on to the engine, which ignores those it does not know.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "minicluster", "version": "1"},
        "paths": {
            "/v1/completions": _generating("completions", _completion(config), needs_key=needs_key),
            "/v1/chat/completions": _generating("chat", _chat(config), needs_key=needs_key),
            "/v1/models": _reading("models", {"$ref": "#/components/schemas/Models"}),
            "/v1/models/{model}": _model(config),
            "/health": _reading("health", None),
            "/ready": _reading("ready", {"$ref": "#/components/schemas/Ready"}, also="503"),
            "/metrics": _reading("metrics", None),
            "/plan": _reading("plan", {"type": "object", "required": ["planned", "measured"]}),
        },
        "components": {
            "schemas": _answers(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        **({"security": [{"key": []}]} if needs_key else {}),
    }


def _generating(name: str, body: Schema, *, needs_key: bool) -> Schema:
    errors = [
        "400",
        "403",
        "404",
        "413",
        "429",
        "500",
        "503",
        "504",
        *(["401"] if needs_key else []),
    ]
    answer = {"$ref": "#/components/schemas/Answer"}
    content = {"application/json": {"schema": answer}, "text/event-stream": {"schema": {}}}
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


def _reading(name: str, schema: Schema | None, *, also: str | None = None) -> Schema:
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


def _model(config: EndpointConfig) -> Schema:
    path = _reading("model", {"$ref": "#/components/schemas/Model"})
    name = {"type": "string", "examples": [config.model_id], "minLength": 1}
    path["get"]["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": name}]
    path["get"]["responses"]["404"] = _error()
    return path


def _error() -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": "Refused; the message says why.", "content": content}


def _sampling(config: EndpointConfig) -> Schema:
    longest = config.max_model_len - 1
    tokens = {"type": ["integer", "null"], "minimum": 1, "maximum": longest}
    return {
        "model": {"const": config.model_id},
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


def _completion(config: EndpointConfig) -> Schema:
    ids = {"type": "array", "items": COUNT, "minItems": 1, "maxItems": config.max_model_len - 1}
    text = {"type": "string", "minLength": 1}
    prompts = [{"type": "array", "items": each, "minItems": 1, "maxItems": 4} for each in (text,)]
    properties = {
        **_sampling(config),
        "prompt": {"anyOf": [text, ids, *prompts]},
        "echo": FLAG,
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    }
    return {"type": "object", "required": ["prompt"], "properties": properties}


def _chat(config: EndpointConfig) -> Schema:
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
    }
    properties = {
        **_sampling(config),
        "messages": {"type": "array", "items": message, "minItems": 1},
        "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1},
    }
    return {"type": "object", "required": ["messages"], "properties": properties}


def _answers() -> Schema:
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
