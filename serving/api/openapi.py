"""The OpenAPI schema of the endpoint: requests and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from serving.protocol.endpoint_config import EndpointConfig

TEXT = (Path(__file__).parent / "openapi.yaml").read_text(encoding="utf-8")


def openapi(config: EndpointConfig, *, needs_key: bool) -> dict[str, Any]:
    """Return the schema of the endpoint of a plan; *needs_key*: whether it needs an API key."""
    longest = str(config.max_model_len - 1)
    text = TEXT.replace("LONGEST", longest).replace("MODEL_ID", json.dumps(config.model_id))
    schema: dict[str, Any] = yaml.safe_load(text)
    del schema["x-responses"]  # anchors only
    return schema | ({"security": [{"key": []}]} if needs_key else {})
