"""What is recorded of every answer: a counter, a line of the access log, and a trace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from minicluster.errors import InputError
from serving.api.app import access_log, write_access_log
from serving.api.tracing import request_tracer
from serving.protocol.messages import EndpointConfig
from tests.serving.fake_servers import FakeServers
from tests.serving.http_client import KEY, LOCKED, ONE, one, visiting
from tests.serving.virtual_time import in_virtual_time

COMPLETIONS = "/v1/completions"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Any]:
    """Return what reads the lines of the access log."""
    file = tmp_path / "access.log"
    write_access_log(file)
    yield lambda: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    logging.shutdown([lambda: access_log.handlers[-1]])
    access_log.removeHandler(access_log.handlers[-1])


OK = {"status": 200, "outcome": "ok", "seconds": 0.8, "ttft_s": 0.5, "output_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "headers", "expected"),
    [
        (
            *(COMPLETIONS, ONE, BEARER),
            OK | {"route": COMPLETIONS, "key": "alice", "prompt_tokens": 3, "path": "remote"},
        ),
        (COMPLETIONS, {**ONE, "stream": True}, BEARER, OK),
        (COMPLETIONS, ONE, {}, {"status": 401, "error": "invalid_api_key", "route": COMPLETIONS}),
        (COMPLETIONS, b"{", BEARER, {"status": 400, "key": "alice"}),
        (COMPLETIONS, ONE | {"n": 0}, BEARER, {"status": 400, "error": "unsupported_value"}),
        (COMPLETIONS, None, {}, {"status": 405, "method": "GET", "error": "invalid_request_error"}),
        ("/plan", ONE, {}, {"status": 405, "method": "POST"}),
        ("/health", None, {}, {"status": 200, "route": "/health", "method": "GET"}),
        ("/v1/models/gpt", None, BEARER, {"status": 404, "route": "/v1/models/{model:path}"}),
        ("/no-such-page", None, {}, {"status": 404, "route": "none"}),
    ],
)
def test_every_answer_is_counted_and_logged(
    config: EndpointConfig,
    lines: Any,  # noqa: ANN401
    path: str,
    body: object,
    headers: dict[str, str],
    expected: dict[str, Any],
) -> None:
    """With the name of the key and the request's id, without a word of prompt or key."""
    servers, sent = FakeServers(ttft_s=0.5, itl_s=0.1), {"X-Request-Id": "mine", **headers}
    answer = one(config, path, body, servers=servers, headers=sent, environment=LOCKED)
    first, scrape = lines()
    assert first["request_id"] == answer.headers["X-Request-Id"] == "mine"
    assert {name: first.get(name) for name in expected} == pytest.approx(expected)
    assert (scrape["route"], scrape["status"]) == ("/metrics", 200)
    assert KEY not in json.dumps(first)
    counted = f'{{route="{first["route"]}",status="{first["status"]}"}} 1.0'
    assert f"minicluster_http_responses_total{counted}" in answer.extensions["metrics"]
    assert ("Allow" in answer.headers) == (answer.status_code == 405)
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@in_virtual_time
async def test_no_client_makes_a_line_long(config: EndpointConfig, lines: Any) -> None:  # noqa: ANN401
    """Whatever it sends, and without a key: else it would rotate the lines of others away."""
    long = "M" * 30_000
    async with visiting(config, environment=LOCKED) as client:
        for path in ("/health", f"/{long}", f"/v1/models/{long}?{long}"):
            await client.request(long, path, headers={"X-Request-Id": long, "User-Agent": long})
            await client.get(path, headers={"Authorization": long, "Host": long, "Origin": long})
    assert len(lines()) == 6
    assert all(len(json.dumps(line)) < 500 for line in lines())
    assert lines()[0]["method"] == "M" * 20


@in_virtual_time
async def test_streams_that_break_or_are_left_say_so(config: EndpointConfig, lines: Any) -> None:  # noqa: ANN401
    for servers in (FakeServers(fails_after=2), FakeServers(ttft_s=5.0)):
        async with visiting(config, servers) as client:
            asked = client.post(COMPLETIONS, json={**ONE, "stream": True})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked, 1.0)
    broken, left = lines()
    assert (broken["status"], broken["outcome"], broken["error"]) == (200, "broken", "server_error")
    assert (left["status"], left["outcome"], left["seconds"]) == (499, "cancelled", 1.0)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Return the address of a collector of traces, and the spans that it has got."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in sent.resource_spans:
                spans.extend(each for scope in resource.scope_spans for each in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    thread.join()
    server.server_close()


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_is_traced_below_its_parent(
    config: EndpointConfig, collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts end where the next begins: admission, the phases before the first token, decode."""
    address, spans = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    tracers: list[Any] = []

    def keep(environment: Any) -> Any:  # noqa: ANN401
        tracers.append(request_tracer(environment))
        return tracers[-1]

    monkeypatch.setattr("serving.api.app.request_tracer", keep)
    headers = {"traceparent": PARENT, "X-Request-Id": "mine"}
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": address}
    servers = FakeServers(ttft_s=0.5, itl_s=0.1)
    one(config, COMPLETIONS, ONE, headers=headers, environment=environment, servers=servers)
    tracers[0].close()
    found = {span.name: span for span in spans}
    root, _ = found.pop(f"POST {COMPLETIONS}"), found.pop("GET /metrics")
    assert root.trace_id.hex() == PARENT.split("-")[1]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    assert {span.parent_span_id for span in found.values()} == {root.span_id}
    assert {"admission", "decode"} <= found.keys()
    decode_s = (found["decode"].end_time_unix_nano - found["decode"].start_time_unix_nano) / 1e9
    whole_s = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert (decode_s, whole_s) == (pytest.approx(0.3), pytest.approx(0.8))
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["minicluster.request_id"].string_value == "mine"
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4


@pytest.mark.parametrize(
    ("environment", "bad"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ""),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, ""),
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "x"}, "PROTOCOL"),
    ],
)
def test_nothing_is_traced_unless_an_exporter_is_named(
    environment: dict[str, str], bad: str
) -> None:
    if not bad:
        assert request_tracer(environment) is None
        return
    with pytest.raises(InputError, match=bad):
        request_tracer(environment)
