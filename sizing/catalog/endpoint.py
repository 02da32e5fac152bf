"""What endpoint processes and their gate cost, `configs/endpoint.toml`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from minicluster.config import parse, read_toml
from minicluster.plan import EndpointLoad
from minicluster.specs.checks import Fraction, Positive
from sizing.catalog.folder import configs


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCost:
    """
    Processor time and memory of the processes in front of the engines.

    Attributes:
        token_s: seconds of a core that an endpoint process takes per streamed token.
        request_s: the same per request, beside its tokens.
        gate_request_s: seconds of a core that the gate takes per request.
        busy_fraction: largest part of a core at which a process delays no request.
        process_bytes: memory of a process without requests.
        stream_bytes: memory that a stream adds to its endpoint process.
        document, date: source of the figures.
    """

    token_s: Positive
    request_s: Positive
    gate_request_s: Positive
    busy_fraction: Fraction
    process_bytes: Positive
    stream_bytes: Positive
    document: str
    date: str

    @property
    def gate_requests_per_s(self) -> float:
        """Requests per second that one gate carries."""
        return self.busy_fraction / self.gate_request_s

    def load(
        self,
        *,
        requests_per_s: float,
        output_tokens_per_s: float,
        streams: float,
        spare: bool = False,
    ) -> EndpointLoad:
        """
        Return the processes that carry a load, and what they take of the hosts.

        Args:
            requests_per_s: mean rate.
            output_tokens_per_s: mean rate.
            streams: requests in flight.
            spare: whether one process more is wanted, so that one may be lost.
        """
        cores = self.request_s * requests_per_s + self.token_s * output_tokens_per_s
        processes = max(1, math.ceil(cores / self.busy_fraction - 1e-9)) + spare
        return EndpointLoad(
            processes=processes,
            cores=cores,
            gate_cores=self.gate_request_s * requests_per_s,
            memory_bytes=(processes + 1) * self.process_bytes + streams * self.stream_bytes,
        )


@cache
def endpoint_cost() -> EndpointCost:
    """Return the figures of the file."""
    path = configs() / "endpoint.toml"
    return parse(EndpointCost, read_toml(path), place=path.name)
