"""OpenTelemetry traces of requests, by the standard SDK and its own environment variables."""

from __future__ import annotations

import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from minicluster.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace.export import SpanExporter

    from serving.api.endpoint import AnswerRecord

Facts = dict[str, str | int | float]
"""What is known of a request and may be shown, by names in the access log."""

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""Names of the exporters by protocol, the default first, as OpenTelemetry's packages have them."""

SERVICE = "minicluster"

ATTRIBUTES = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "error": "error.type",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    **{
        name: f"minicluster.{name}"
        for name in ("request_id", "key", "outcome", "path", "prefill_replica", "decode_replica")
    },
}
"""Attributes of a request's span by their names in the access log."""


def request_tracer(environment: Mapping[str, str]) -> RequestTracer | None:
    """
    Return what exports traces; `None` unless *environment* names an exporter or its endpoint.

    The SDK reads the rest itself: endpoint, headers, sampler, service name, attributes.

    Raises:
        InputError: an exporter or a protocol that there is not.
    """
    named = environment.get(EXPORTER, "otlp" if any(map(environment.get, ENDPOINTS)) else "none")
    if named == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if named not in {"otlp", "console"}:
        raise InputError(EXPORTER, named, "otlp, console or none")
    if named == "otlp":
        protocol = next(filter(None, map(environment.get, PROTOCOLS)), next(iter(OTLP)))
        if protocol not in OTLP:
            raise InputError(PROTOCOLS[1], protocol, " or ".join(OTLP))
        named = OTLP[protocol]
    [exporter] = entry_points(group="opentelemetry_traces_exporter", name=named)
    return RequestTracer(exporter.load()())


class RequestTracer:
    """
    Writes the spans of a request when it has ended, from its record.

    The request is a span of kind server below the client's `traceparent`; below it are `admission`,
    the phases of the time to first token by their names in `Server-Timing`, and `decode`. The
    phases are the engines' own times and end at the first token; routing is before them.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        """Export from a thread of its own."""
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  (few endpoints need it)
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        # The SDK's own variables come after it, and win.
        resource = Resource({"service.name": SERVICE}).merge(Resource.create())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)

    def export(self, record: AnswerRecord, facts: Facts, headers: Mapping[str, str]) -> None:
        """Write the spans of a request that ends now, by what is known of it and its headers."""
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        now_ns, now_s = time.time_ns(), time.perf_counter()

        def at(seconds: float) -> int:
            return now_ns - round((now_s - seconds) * 1e9)

        span = self._tracer.start_span(
            f"{facts['method']} {facts['route']}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=trace.SpanKind.SERVER,
            start_time=at(record.started_s),
            attributes={name: facts[fact] for fact, name in ATTRIBUTES.items() if fact in facts},
        )
        if record.status >= 500 or record.outcome == "broken":  # noqa: PLR2004
            span.set_status(trace.StatusCode.ERROR, record.error or record.outcome)
        below = trace.set_span_in_context(span)
        for name, start_s, end_s in _parts(record):
            part = self._tracer.start_span(name, context=below, start_time=at(start_s))
            part.end(at(end_s))
        span.end(now_ns)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


def _parts(record: AnswerRecord) -> Iterator[tuple[str, float, float]]:
    if record.admitted_s is not None:
        yield "admission", record.started_s, record.admitted_s
    if record.first_s is None or record.phases is None:
        return
    phases_s = {name: phase_s for name, phase_s in record.phases.phases_s.items() if phase_s > 0}
    start_s = record.first_s - sum(phases_s.values())
    for name, seconds in phases_s.items():
        yield name, start_s, start_s + seconds
        start_s += seconds
    if record.last_s is not None and record.last_s > record.first_s:
        yield "decode", record.first_s, record.last_s
