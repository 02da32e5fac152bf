"""The application of an endpoint whose gate is in its own process."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette

from serving.admission.controller import read_admission
from serving.api.app import api_app
from serving.api.gate import Gate
from serving.protocol.messages import Backend, EndpointConfig
from serving.request.cost import read_token_limit


def endpoint_app(
    config: EndpointConfig,
    servers: Backend,
    environment: Mapping[str, str],
    *,
    host: str = "",
    former: Starlette | None = None,
) -> Starlette:
    """Return the application, as `api_app` and `Gate` take the same arguments."""
    gate = Gate(
        config,
        servers,
        sheds=read_admission(environment),
        token_limit=read_token_limit(environment),
        former=None if former is None else former.state.endpoint.gate,
    )
    return api_app(config, servers, gate, environment, host=host, former=former)
