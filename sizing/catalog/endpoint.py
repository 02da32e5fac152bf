"""What the endpoint's process costs, `configs/endpoint.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from minicluster.config import parse, read_toml
from minicluster.specs.checks import Fraction, Positive
from sizing.catalog.folder import configs


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCost:
    """
    The processor time of one endpoint process.

    Attributes:
        token_s: seconds of a core per streamed token.
        request_s: seconds of a core per request, beside its tokens.
        busy_fraction: largest part of a core at which the process delays no request.
        document, date: where the figures come from.
    """

    token_s: Positive
    request_s: Positive
    busy_fraction: Fraction
    document: str
    date: str

    def cores(self, *, requests_per_s: float, output_tokens_per_s: float) -> float:
        """Return the cores that a load keeps busy in the endpoint."""
        return self.request_s * requests_per_s + self.token_s * output_tokens_per_s


@cache
def endpoint_cost() -> EndpointCost:
    """Return the figures of the file."""
    path = configs() / "endpoint.toml"
    return parse(EndpointCost, read_toml(path), place=path.name)
